"""`tidemill submit` and `tidemill schedule`: runs on KFP, started now or by a schedule."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidemill_pipelines.catalogue import Job

from tidemill.cli.cron import next_times, six_fields
from tidemill.config.address import is_server
from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError, StoreError
from tidemill.kuberay.manifest import manifests
from tidemill.rollout.sources import load_rows
from tidemill.steps.request import DEFAULTS, RUN_ID_LENGTH, Request, entries, short_id
from tidemill.steps.sweep import variant_configs
from tidemill.store.inputs import local_files, upload_prompts

ENDPOINT = "KF_PIPELINES_ENDPOINT"
OUTPUT = "/tmp/tidemill"
"""Folder of the run in the pod of a step; what must survive the pod goes to the store."""
SHOWN_TIMES = 3
ANY_RUN = "0" * RUN_ID_LENGTH
"""Takes the place of the KFP run's id, to check that a run's name has room for it."""
STORED = ("/", ".jsonl", ".parquet")
"""How a folder or a file of prompts in the store ends."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `submit` and `schedule` tell KFP besides the run, by the names of their options; and whether to debug."""

    variants: str | None
    prompts: str | None
    endpoint: str | None
    kfp_namespace: str
    experiment: str | None
    service_account: str
    steps_image: str | None
    store_endpoint: str | None
    debug: bool

    @property
    def pipeline(self) -> str:
        """Name of the pipeline that the options choose."""
        return "sweep" if self.variants else "continual" if self.prompts else "post_training"

    def connected(self) -> AbstractContextManager[Any]:
        """A `tidemill_pipelines.service.Service` for the body of a `with`."""
        from tidemill_pipelines.service import connected

        service: AbstractContextManager[Any] = connected(self.address(), self.kfp_namespace, debug=self.debug)
        return service

    def address(self) -> str:
        """Address of KFP's API.

        Raises:
            ConfigError: it is missing or none.
        """
        address = self.endpoint or os.environ.get(ENDPOINT)
        if not address or not is_server(address):
            fix = "Forward a port: kubectl -n kubeflow port-forward svc/ml-pipeline 8888"
            raise ConfigError("--endpoint", address, f"http(s)://HOST:PORT of KFP's API, or {ENDPOINT} set to it", fix)
        return address


def submit(file: str, overrides: list[str], options: Options, *, resume: str | None, dry_run: bool, wait: bool) -> int:
    """Start a run; returns the exit status."""
    config = configured(file, overrides, options)
    parameters = parameters_of(config, options, resume)
    if dry_run:
        print("\n".join(dry_run_comments(config, parameters)))
        print(manifests(config), end="")
        return 0
    job = job_of(config, options, parameters, resume or config.name)
    with options.connected() as kfp:
        created = kfp.run(job)
    run = resume or f"{config.name}-{short_id(created.id)}"
    hint = commands_for(run, parameters.get("variants"))
    print(f"run {run}: {created.page}\n{hint}", flush=True)
    if not wait:
        return 0
    try:
        with options.connected() as kfp:
            state = kfp.wait(created.id)
    except KeyboardInterrupt:
        print(f"the run continues: {hint}")
        raise
    print(f"run {run}: {state}")
    return 0 if state == "SUCCEEDED" else 1


def commands_for(run: str, variants: str | None) -> str:
    """The commands that watch and stop a run; for a sweep, which has no cluster of its own, those of its variants."""
    if variants is None:
        return f"tidemill status {run}, tidemill logs {run}, tidemill stop {run}"
    last = len(entries("variants", variants))
    return (
        f"its runs are {run}-v1 to {run}-v{last}: tidemill status all, tidemill logs {run}-v1, tidemill stop {run}-v1"
    )


def check_one_action(given: Mapping[str, object]) -> None:
    """Check that `tidemill schedule` has exactly one thing to do.

    Raises:
        ConfigError: it has none or several.
    """
    names = [name for name, value in given.items() if value]
    if names not in (
        ["FILE", "--cron"],
        ["--list"],
        ["--delete"],
        ["--delete", "--wait"],
        ["--delete", "--stop"],
    ):
        allowed = "FILE with --cron, or --list, or --delete NAME with --wait, --stop or neither"
        fix = 'For example: tidemill schedule run.yaml --cron "0 2 * * *"'
        raise ConfigError("schedule", " with ".join(names) or None, allowed, fix)


def schedule(file: str, overrides: list[str], options: Options, cron: str, name: str | None) -> int:
    """Create a schedule."""
    expression, config = six_fields(cron), configured(file, overrides, options)
    job = job_of(config, options, parameters_of(config, options), name or config.name)
    with options.connected() as kfp:
        created = kfp.schedule(job, expression)
    print(f"schedule {job.name}: {created.page}")
    times = [f"{time:%Y-%m-%d %H:%M:%S}" for time in next_times(expression, SHOWN_TIMES, datetime.now(UTC))]
    when = f"next at {', '.join(times)} UTC" if times else "it has no next time"
    print(f"{expression} (seconds first): {when}; a run starts only after the one before has ended")
    return 0


def list_schedules(options: Options) -> int:
    """Print all schedules."""
    with options.connected() as kfp:
        found = kfp.schedules()
    print("\n".join(f"{each.name}  {each.cron}  {each.mode}" for each in found) or "KFP has no schedule")
    return 0


def delete_schedule(options: Options, name: str, *, wait: bool, stop: bool) -> int:
    """Delete a schedule once its runs have ended, because KFP deletes the running ones with it and frees nothing.

    Args:
        options: of KFP.
        name: of the schedule.
        wait: wait for the end of the runs; without this and `stop` a schedule with runs is only disabled.
        stop: terminate the runs.

    Returns:
        Exit status, 1 if the schedule still exists.

    Raises:
        RunError: the schedule does not exist, KFP refuses, or a terminated run does not end.
    """
    with options.connected() as kfp:
        schedules = kfp.disable_schedule(name)
        runs = [run for schedule in schedules for run in kfp.runs_of(schedule)]
    print(f"the schedule {name} is disabled and starts no further run", flush=True)
    for run in runs:
        end = "is terminated" if stop else "goes on"
        print(f"{run.name} {end}; `tidemill status all` names it ...-{short_id(run.id)}: {run.page}", flush=True)
    if runs and not (wait or stop):
        print(
            "It is not deleted, because KFP would delete its runs with it. --wait deletes it after their end, --stop "
            "terminates them first."
        )
        return 1
    end_runs(options, [run.id for run in runs], stop=stop)
    with options.connected() as kfp:
        for schedule in schedules:
            kfp.delete_schedule(schedule)
    print(f"deleted the schedule {name}")
    return 0


def end_runs(options: Options, runs: list[str], *, stop: bool) -> None:
    """Wait for the end of KFP runs, or terminate them.

    Raises:
        RunError: a terminated run does not end.
    """
    from tidemill_pipelines.service import TERMINATION_S

    with options.connected() as kfp:
        for run in runs if stop else ():
            kfp.terminate(run)
        for run in runs:
            if not kfp.wait(run, limit_s=TERMINATION_S if stop else math.inf):
                raise RunError(
                    f"KFP run {run} was terminated and has not ended after {TERMINATION_S:.0f} s. Look at its page; "
                    "the schedule is disabled and not deleted."
                )


def job_of(config: RunConfig, options: Options, parameters: Mapping[str, str], name: str) -> Job:
    """What KFP is to execute, after the upload of prompts that are files of this machine.

    Raises:
        ConfigError: the address of KFP is missing or none.
        StoreError: the prompts cannot be uploaded.
    """
    options.address()
    try:
        uploaded = upload_prompts(config, options.store_endpoint)
    except StoreError as error:
        forward = f"kubectl -n {config.kubernetes.namespace} port-forward svc/store 9000"
        hint = f"From outside the cluster: {forward}, then --store-endpoint http://127.0.0.1:9000"
        text = f"prompts in files of this machine cannot be uploaded: {error}"
        raise StoreError(text if options.store_endpoint else f"{text}. {hint}") from error
    return Job(
        name=name,
        pipeline=options.pipeline,
        parameters={**parameters, "config": text_of(uploaded)},
        experiment=options.experiment or config.tracking.experiment,
        create_experiment=options.experiment is None,
        service_account=options.service_account,
    )


def configured(file: str, overrides: list[str], options: Options) -> RunConfig:
    """The settings of a run that can work in a cluster.

    Raises:
        ConfigError: a setting needs something that a cluster does not have.
        DataError: a file of prompts is missing or broken.
    """
    config = load_config(file, overrides)
    if config.cluster.provider != "kuberay":
        fix = "Set cluster.provider=kuberay and the settings of docs/kfp.md. `tidemill run` runs it on this machine."
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay", fix)
    if Path(config.model).expanduser().is_dir():
        fix = "Upload the folder to the store and name it there."
        raise ConfigError("model", config.model, "s3://BUCKET/PREFIX, models:/NAME/VERSION or a Hugging Face name", fix)
    for key, path in local_files(config).items():
        load_rows(str(path), config.data, f"data.{key}")
    prompts = options.prompts
    if (options.variants or prompts) and config.data.held_out is None:
        fix = "Name a file: the scores on it decide which model is better."
        raise ConfigError("data.held_out", None, "held-out prompts with --variants and --prompts", fix)
    if prompts and ("://" not in prompts or (prompts.startswith("s3://") and not prompts.endswith(STORED))):
        fix = "Pods cannot read files of this machine, and a folder of the store ends with a slash."
        raise ConfigError("--prompts", prompts, "s3://BUCKET/PREFIX/, or any source that data.train accepts", fix)
    return config


def parameters_of(config: RunConfig, options: Options, resume: str | None = None) -> dict[str, str]:
    """Parameters of the pipeline, before prompts are uploaded.

    Raises:
        ConfigError: a variant is wrong, or the options choose two pipelines.
    """
    if options.variants and options.prompts:
        fix = "--variants asks for a sweep, --prompts for continual training."
        raise ConfigError("--variants", options.variants, "without --prompts", fix)
    fields = [name for name in DEFAULTS if not (options.prompts and name == "data_train")]
    given = {
        **dict.fromkeys(fields, ""),  # the settings hold them
        "config": text_of(config),
        "variants": read_variants(options.variants),
        "prompts": options.prompts,
        "run_name": resume,
        "steps_image": options.steps_image,
        "store_secret": config.kubernetes.store_secret,
    }
    parameters = {name: value for name, value in given.items() if value is not None}
    request = Request(parameters["config"], run_name=resume or "", kfp_run=ANY_RUN)
    if "variants" in parameters:
        list(variant_configs(request, parameters["variants"]))
    else:
        request.settings()
    return parameters


def read_variants(path: str | None) -> str | None:
    """The file of a sweep's variants.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--variants", path, "a readable file with one variant per line", f"{error}.") from error


def text_of(config: RunConfig) -> str:
    """The settings that differ from the defaults, as JSON, which KFP shows indented and its form leaves as it is."""
    tree = config.model_copy(update={"output": Path(OUTPUT)}).model_dump(mode="json", exclude_defaults=True)
    return json.dumps(tree, ensure_ascii=False)


def dry_run_comments(config: RunConfig, parameters: Mapping[str, str]) -> Iterator[str]:
    """Parameters and uploads, as YAML comments above the manifests."""
    for name, value in parameters.items():
        if not value:
            continue
        yield f"# parameter {name}:"
        yield from (f"#   {line}" for line in value.splitlines())
    for key, path in local_files(config).items():
        yield f"# data.{key}: {path} is uploaded to {config.store.bucket} at {config.store.endpoint}"
