"""`tidemill submit` and `tidemill schedule`: a run handed over to KFP, now or again and again.

KFP's client lives in a process of its own (`tidemill_pipelines.service`), because only the pipelines know KFP.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tidemill.cli.cron import Cron, next_times
from tidemill.config.address import is_server
from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError, StoreError
from tidemill.kuberay.manifest import manifests
from tidemill.rollout.sources import load_rows
from tidemill.steps.request import MARK, Request, entries, mark
from tidemill.steps.sweep import variants
from tidemill.store.inputs import local_files, upload_prompts

SERVICE = "tidemill_pipelines.service"
ENDPOINT = "KF_PIPELINES_ENDPOINT"
OUTPUT = "/tmp/tidemill"
"""Folder of the run in a step's pod, whatever its image; what is to stay goes to the store."""
SHOWN_TIMES = 3
SEEN = " --store-endpoint says where it is seen from here, such as http://127.0.0.1:9000 behind"
FORWARD = "port-forward svc/store 9000."
SOME_RUN = "0" * MARK
"""Stands for the id of the KFP run, to see whether a run's name has room for it."""
STORED = ("/", ".jsonl", ".parquet")
"""How a folder or a file of prompts in the store ends."""


def submit(arguments: argparse.Namespace) -> int:
    """Start a run on KFP; returns the exit status."""
    config, console = configured(arguments), Console(soft_wrap=True, highlight=False)
    parameters = parameters_of(config, arguments)
    if arguments.dry_run:
        show(config, parameters, console)
        return 0
    made = call("run", order(arguments, parameters, arguments.resume or config.name, config))
    run = arguments.resume or f"{config.name}-{mark(made['id'])}"
    for line in (f"run {run}: {made['page']}", how_to_watch(run, parameters.get("variants"))):
        console.print(line, markup=False)
    return wait(made["id"], run, parameters.get("variants"), arguments, console) if arguments.wait else 0


def how_to_watch(run: str, variants: str | None) -> str:
    """The commands for a run; those for the runs of a sweep, which itself has no cluster."""
    if variants is None:
        return f"tidemill status {run}, tidemill logs {run}, tidemill stop {run}"
    last = len(entries("variants", variants))
    return (
        f"its runs are {run}-v1 to {run}-v{last}: tidemill status all, tidemill logs {run}-v1, tidemill stop {run}-v1"
    )


def wait(key: str, run: str, variants: str | None, arguments: argparse.Namespace, console: Console) -> int:
    """Wait for the end of a run; returns 0 if it succeeded."""
    try:
        state = call("wait", {"id": key, **reach(arguments)})["state"]
    except KeyboardInterrupt:
        console.print(f"the run goes on: {how_to_watch(run, variants)}", markup=False)
        raise
    console.print(f"run {run}: {state}", markup=False)
    return 0 if state == "SUCCEEDED" else 1


def schedule(arguments: argparse.Namespace) -> int:
    """Start, list or delete schedules; returns the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    check_schedule(arguments)
    if arguments.list:
        rows = call("schedules", reach(arguments))["schedules"]
        lines = [f"{row['name']}  {row['cron']}  {row['mode']}" for row in rows]
        for line in lines or ["KFP has no schedule"]:
            console.print(line, markup=False)
        return 0
    if arguments.delete:
        call("delete", {"name": arguments.delete, **reach(arguments)})
        console.print(f"deleted the schedule {arguments.delete}; runs that it started go on", markup=False)
        return 0
    cron, config = Cron.parse(arguments.cron), configured(arguments)
    parameters = parameters_of(config, arguments)
    made = call("schedule", {"cron": cron.text, **order(arguments, parameters, arguments.name or config.name, config)})
    console.print(f"schedule {arguments.name or config.name}: {made['page']}", markup=False)
    times = [f"{time:%Y-%m-%d %H:%M:%S}" for time in next_times(cron, SHOWN_TIMES, datetime.now(UTC))]
    said = f"next at {', '.join(times)} UTC" if times else "it has no next time"
    console.print(f"{cron.text} (seconds first): {said}; a run that is still going on is not joined by another")
    return 0


def check_schedule(arguments: argparse.Namespace) -> None:
    """Refuse to do two things at once, or nothing.

    Raises:
        ConfigError: not exactly one of a run file with --cron, --list and --delete is there.
    """
    asked = {
        "a run file": arguments.file,
        "--cron": arguments.cron,
        "--list": arguments.list,
        "--delete": arguments.delete,
    }
    given = [name for name, value in asked.items() if value]
    if given not in (["a run file", "--cron"], ["--list"], ["--delete"]):
        fix = 'For example: tidemill schedule run.yaml --cron "0 2 * * *"'
        allowed = "a run file with --cron, or --list, or --delete NAME"
        raise ConfigError("schedule", " with ".join(given) or None, allowed, fix)


def configured(arguments: argparse.Namespace) -> RunConfig:
    """The settings of a run that can go on in a cluster.

    Raises:
        ConfigError: they say something that a cluster does not have.
        DataError: a file of prompts is not there or broken.
    """
    config = load_config(arguments.file, arguments.overrides)
    if config.cluster.provider != "kuberay":
        fix = "Set cluster.provider=kuberay and what goes with it: docs/kfp.md. `tidemill run` runs it on this machine."
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay", fix)
    if Path(config.model).expanduser().is_dir():
        fix = "Upload the folder to the store and name it there."
        raise ConfigError("model", config.model, "s3://BUCKET/PREFIX, models:/NAME/VERSION or a Hugging Face name", fix)
    for key, path in local_files(config).items():
        load_rows(str(path), config.data, f"data.{key}")
    check_learning(config, arguments)
    return config


def check_learning(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Refuse a sweep or continual training whose first step would refuse it, perhaps at night.

    Raises:
        ConfigError: there are no prompts to compare on, or pods do not see the new ones.
    """
    prompts = arguments.prompts
    if (arguments.variants or prompts) and config.data.held_out is None:
        fix = "Name a file: the scores on it decide which model is better."
        raise ConfigError("data.held_out", None, "held-out prompts with --variants and --prompts", fix)
    if prompts and ("://" not in prompts or (prompts.startswith("s3://") and not prompts.endswith(STORED))):
        fix = "Pods see no file of this machine, and a folder of the store has a slash at its end."
        raise ConfigError("--prompts", prompts, "s3://BUCKET/PREFIX/, or any source that data.train may be", fix)


def parameters_of(config: RunConfig, arguments: argparse.Namespace) -> dict[str, str]:
    """Parameters of the pipeline, before prompts are uploaded.

    Raises:
        ConfigError: a variant is wrong, or two pipelines are asked for at once.
    """
    own = {"variants": read_variants(arguments.variants), "prompts": arguments.prompts}
    if all(own.values()):
        fix = "--variants asks for a sweep, --prompts for continual training."
        raise ConfigError("--variants", arguments.variants, "without --prompts", fix)
    own |= {"run_name": arguments.resume} if arguments.command == "submit" else {}
    own |= {"steps_image": arguments.steps_image, "store_secret": config.kubernetes.store_secret}
    parameters = {"config": text_of(config), **{name: value for name, value in own.items() if value is not None}}
    asked = Request(parameters["config"], run_name=parameters.get("run_name", ""), kfp_run=SOME_RUN)
    if "variants" in parameters:
        list(variants(asked, parameters["variants"]))
    else:
        asked.settings()
    return parameters


def read_variants(path: str | None) -> str | None:
    """The file of a sweep's variants.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--variants", path, "a readable file with a variant a line", f"{error}.") from error


def text_of(config: RunConfig) -> str:
    """The settings as a person reads them in KFP's form: what differs from the defaults."""
    tree = config.model_copy(update={"output": Path(OUTPUT)}).model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def pipeline_of(arguments: argparse.Namespace) -> str:
    """Which pipeline is asked for."""
    return "sweep" if arguments.variants else "continual" if arguments.prompts else "post_training"


def show(config: RunConfig, parameters: Mapping[str, str], console: Console) -> None:
    """What would be sent to KFP, what uploaded, and what would be made in the cluster."""
    for line in dry_lines(config, parameters):
        console.print(line, markup=False)
    console.print(manifests(config), markup=False, end="")


def dry_lines(config: RunConfig, parameters: Mapping[str, str]) -> Iterator[str]:
    """Parameters and uploads, as comments of YAML."""
    for name, value in parameters.items():
        yield f"# parameter {name}:"
        yield from (f"#   {line}" for line in value.splitlines())
    for key, path in local_files(config).items():
        yield f"# data.{key}: {path} goes to {config.store.bucket} at {config.store.endpoint}"


def reach(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where KFP is.

    Raises:
        ConfigError: nobody said it.
    """
    endpoint = arguments.endpoint or os.environ.get(ENDPOINT)
    if not endpoint or not is_server(endpoint):
        fix = "Forward a port: kubectl -n kubeflow port-forward svc/ml-pipeline 8888"
        raise ConfigError("--endpoint", endpoint, f"http(s)://HOST:PORT of KFP's API, or {ENDPOINT} set to it", fix)
    return {"endpoint": endpoint, "namespace": arguments.kfp_namespace, "debug": arguments.debug}


def order(arguments: argparse.Namespace, parameters: Mapping[str, str], name: str, config: RunConfig) -> dict[str, Any]:
    """What KFP is asked for; the files of prompts are uploaded on the way."""
    kfp = reach(arguments)
    try:
        shipped = text_of(upload_prompts(config, arguments.store_endpoint))
    except StoreError as error:
        place = "" if arguments.store_endpoint else f"{SEEN} kubectl -n {config.kubernetes.namespace} {FORWARD}"
        raise StoreError(f"prompts that are files of this machine cannot be uploaded: {error}{place}") from error
    return {
        **kfp,
        "pipeline": pipeline_of(arguments),
        "parameters": {**parameters, "config": shipped},
        "name": name,
        "experiment": arguments.experiment or config.tracking.experiment,
        "make_experiment": arguments.experiment is None,
        "service_account": arguments.service_account,
    }


def call(action: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Do one thing at KFP.

    Raises:
        RunError: KFP cannot be reached or refuses.
    """
    done = subprocess.run(
        [sys.executable, "-m", SERVICE, action], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    lines = done.stderr.strip().splitlines() or ["KFP's client ended without a word"]
    raise RunError(done.stderr.strip() if given.get("debug") else lines[-1])
