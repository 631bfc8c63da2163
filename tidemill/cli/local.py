"""The commands that work on this machine.

A command imports what it needs when it runs, so that help and usage errors appear at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from tidemill_pipelines.catalogue import Pipeline, compiled

from tidemill.cli.options import (
    OptionalRunFile,
    Resume,
    RunFile,
    RunsFolder,
    Settings,
    argument,
    finite,
    not_empty,
    option,
    require,
)
from tidemill.errors import ConfigError, RunError

MAX_PORT = 65535


def run(
    file: OptionalRunFile = None,
    overrides: Settings = [],
    resume: Resume = None,
    output: Annotated[str | None, option("FOLDER", "folder of runs  [default: runs, or output of the file]")] = None,
) -> int:
    """Run the whole pipeline on this machine.

    Steps: validate, provision, train, evaluate, register, and always teardown.
    Every start is a new run with its own folder, runs/NAME-1, runs/NAME-2 and so
    on, which holds config.yaml, log.txt, events.jsonl, summary.json and the
    trained model. Ctrl-C ends everything; --resume continues a run from its newest
    checkpoint.

      tidemill run examples/addition.yaml
      tidemill run examples/addition.yaml seed=3 trainer.learning_rate=2.0e-5
      tidemill run examples/addition.yaml model=/models/mine output=/data/runs
      tidemill run --resume addition-1
      tidemill run --resume addition-1 trainer.steps=50
    """
    from rich.console import Console

    from tidemill.config.reading import load_config
    from tidemill.local.launch import resume_run, start_run
    from tidemill.steps.run_folder import existing_run

    require("kfp")
    if resume:
        config = existing_run(resume, Path(output or "runs"), resumed_overrides(file, overrides, resume))
        return resume_run(config, Console())
    if file:
        return start_run(load_config(file, [*overrides, *output_override(output, overrides)]), Console())
    raise ConfigError("file", None, "a run file, or --resume NAME", "For example: tidemill run examples/addition.yaml")


def resumed_overrides(file: str | None, overrides: Sequence[str], resume: str) -> list[str]:
    """Settings after `--resume`, where the first one takes the place of the file.

    Raises:
        ConfigError: it is a file.
    """
    first = [] if file is None else [file]
    if first and ("=" not in first[0] or Path(first[0]).is_file()):
        fix = f"`tidemill run --resume {resume}` reads the settings that the run was started with."
        raise ConfigError("file", first[0], "a file or --resume, not both", fix)
    return [*first, *overrides]


def output_override(output: str | None, overrides: Sequence[str]) -> list[str]:
    """`--output` as a setting.

    Raises:
        ConfigError: the setting is given too.
    """
    if output is None:
        return []
    if any(override.partition("=")[0] == "output" for override in overrides):
        raise ConfigError("output", output, "either --output or output=, not both", "Leave one of them out.")
    return [f"output={json.dumps(output)}"]


def check(file: RunFile, overrides: Settings = []) -> int:
    """Check whether a run can start, without starting it.

    Checks what `tidemill run` checks first: settings, prompts, rewards, model,
    store, MLflow, and room on this machine. Every prompt is rendered as tokens.
    `tidemill submit FILE --dry-run` checks a run for a cluster.

      tidemill check examples/addition.yaml
      tidemill check my.yaml trainer.steps=500 rewards.0.function=my_rewards:score
    """
    from tidemill.config.reading import load_config
    from tidemill.config.validation import notices
    from tidemill.steps.validate import check_run

    config = load_config(file, overrides)
    if config.cluster.provider == "kuberay":
        allowed = "local or existing: this command checks this machine, not a cluster"
        fix = f"`tidemill submit {file} --dry-run` checks a run for a cluster."
        raise ConfigError("cluster.provider", config.cluster.provider, allowed, fix)
    check_run(config)
    for text in notices(config):
        print(f"{file}: {text}")
    print(f"{file}: no errors in what was checked")
    return 0


def train(context: typer.Context, file: RunFile, overrides: Settings = []) -> int:
    """Train only, without the pipeline around it.

    Joins the Ray cluster at RAY_ADDRESS if that is set, else starts one. The folder
    is runs/NAME; a second start under the same name continues from the newest
    checkpoint.

      tidemill train examples/addition.yaml name=probe trainer.steps=5
    """
    from tidemill.config.reading import load_config

    provider = ["cluster.provider=existing"] if os.environ.get("RAY_ADDRESS") else []
    config = load_config(file, [*provider, *overrides])
    from tidemill.local.foreground import train_in_foreground
    from tidemill.models.locate import pin_model
    from tidemill.steps.provider import train_here

    return train_in_foreground(pin_model(config), partial(train_here, score_last=True), debug=context.obj)


def evaluate(context: typer.Context, file: RunFile, overrides: Settings = []) -> int:
    """Score a model on held-out prompts.

    Answers the held-out prompts of a run file greedily, and prints the answers and
    the score. The model is that of the file; a setting can replace it.

      tidemill evaluate examples/addition.yaml
      tidemill evaluate examples/addition.yaml model=models:/addition/1
    """
    from tidemill.config.reading import load_config
    from tidemill.observe.text import counted
    from tidemill.steps.provider import score
    from tidemill.steps.validate import check_inputs, check_model

    config = load_config(file, overrides)
    if config.data.held_out is None:
        raise ConfigError("data.held_out", None, "a file of prompts", "Name one to score a model on.")
    held_out = {"data.held_out": check_inputs(config)["data.held_out"]}
    check_model(config, held_out, trains=False, say=partial(print, file=sys.stderr))
    say_loading(config.model)
    with quiet(context.obj):
        evaluation = score(config, config.model)
    for answer in evaluation.answers:
        print(f"{answer.reward:5.2f}  {answer.prompt!r} -> {answer.response!r} (expected {answer.expected!r})")
    for reason, number in evaluation.skipped.items():
        print(f"skipped {number}: {reason}")
    print(f"score {evaluation.score:.3f} over {counted(len(evaluation.answers), 'prompt')}")
    return 0


def generate(
    context: typer.Context,
    model: Annotated[str, argument("MODEL", "the model that answers")],
    prompts: Annotated[list[str], argument("PROMPT", "prompts to answer", callback=not_empty)],
    system: Annotated[str | None, option("TEXT", "system message")] = None,
    max_new_tokens: Annotated[int, option("N", "longest answer, in tokens", min=1)] = 64,
    temperature: Annotated[float, option("T", "0 always takes the most likely token", callback=finite)] = 0.0,
    output: RunsFolder = "runs",
    endpoint: Annotated[str, option("URL", "S3 server; embedded is the one below --output")] = "embedded",
    tracking: Annotated[str | None, option("URI", "MLflow server  [default: the SQLite file below --output]")] = None,
) -> int:
    """Let a model answer prompts.

    MODEL is a local folder, s3://BUCKET/PREFIX, models:/NAME/VERSION of the model
    registry, or a Hugging Face name. With several prompts, each stands above its
    answer.

      tidemill generate models:/addition/1 "Compute 2 + 6. Reply with the number."
      tidemill generate runs/addition-1/model "2 + 6?" "9 + 9?" --temperature 1
    """
    from tidemill.config.address import TRACKING, is_tracking
    from tidemill.config.storage import StoreConfig
    from tidemill.models.locate import Locator
    from tidemill.rollout.offline import generate_text

    folder = Path(output).resolve()
    if tracking and not is_tracking(tracking):
        raise ConfigError("--tracking", tracking, TRACKING, "Fix it, or leave it out.")
    if model.startswith("models:/") and not tracking:
        registry_of(folder)
    locator = Locator(StoreConfig(endpoint=endpoint), folder, tracking or f"sqlite:///{folder / 'mlflow.db'}")
    say_loading(model)
    with quiet(context.obj), TemporaryDirectory(prefix="tidemill-model-") as download:
        answers = generate_text(
            locator.fetch_model(model, Path(download)).path,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            system_prompt=system,
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        print(answer if len(answers) == 1 else f"> {prompt}\n{answer}\n")
    return 0


def compile_pipeline(
    overrides: Settings = [],
    pipeline: Annotated[Pipeline | None, typer.Option(help="which pipeline  [default: post_training]")] = None,
    output: Annotated[
        str | None, option("FILE", "file to write  [default: PIPELINE.yaml; manifests are printed]")
    ] = None,
    check: Annotated[str | None, option("FILE", "only check that FILE is what would be written")] = None,
    manifests: Annotated[
        str | None, option("FILE", "write the manifests of this run file instead of a pipeline")
    ] = None,
) -> int:
    """Write a pipeline for KFP, or the manifests of a run.

    Upload the pipeline in the KFP UI, or with `kfp pipeline create -p NAME FILE`.
    Its parameter `config` is the text of a run file; docs/kfp.md describes the
    others.

      tidemill compile
      tidemill compile --pipeline sweep --output sweep.yaml

    With --manifests the command checks and prints what a run creates in a
    Kubernetes cluster. It sends nothing.

      tidemill compile --manifests run.yaml kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3
    """
    if manifests:
        for name, value in (("--check", check), ("--pipeline", pipeline)):
            if value is not None:
                raise ConfigError(name, value, "nothing with --manifests", "Manifests are those of one run.")
        return print_manifests(manifests, overrides, output)
    if overrides:
        fix = "The pipeline takes settings when it is run."
        raise ConfigError("override", overrides[0], "nothing without --manifests", fix)
    require("kfp")
    text = compiled(pipeline or "post_training")
    if not check:
        write(Path(output or f"{pipeline or 'post_training'}.yaml"), text)
    elif not Path(check).is_file() or Path(check).read_text(encoding="utf-8") != text:
        raise RunError(f"{check} is out of date: run `make golden`")
    return 0


def print_manifests(file: str, overrides: Sequence[str], output: str | None) -> int:
    """Print or write what a run creates in a Kubernetes cluster."""
    from tidemill.config.reading import load_config
    from tidemill.kuberay.manifest import manifests

    text = manifests(load_config(file, overrides))
    if output is None:
        print(text, end="")
    else:
        write(Path(output), text)
    return 0


def convert_verl(
    overrides: Annotated[list[str], argument("KEY=VALUE", "settings of verl: KEY=VALUE, +KEY=VALUE, ~KEY")] = [],
    config: Annotated[str | None, option("FILE", "Hydra YAML file that the settings are applied to")] = None,
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="setting of the run file")] = [],
    config_name: Annotated[str | None, typer.Option("--config-name", "-cn", hidden=True)] = None,
    config_path: Annotated[str | None, typer.Option("--config-path", "-cp", hidden=True)] = None,
) -> int:
    """Convert a verl command to a run file.

    Write `tidemill convert-verl` in place of `python3 -m verl....main` in your
    script and run the script: the shell expands the settings. Each setting is
    converted, listed as left out, or refused by name; docs/verl_settings.md has
    the whole table. --set may be repeated.

      tidemill convert-verl data.train_files=train.parquet ... > run.yaml
      tidemill convert-verl --config .hydra/config.yaml ~trainer.logger > run.yaml
    """
    from tidemill.verl.convert import convert

    hydra = {"--config-name": config_name, "--config-path": config_path}
    options = [f"{name}={value}" for name, value in hydra.items() if value is not None]
    path = None if config is None else Path(config)
    print(convert([*options, *overrides], settings, os.environ, path), end="")
    return 0


def timeline(
    run: Annotated[str, argument("RUN", "name of a run below runs/, or its folder")],
    last: Annotated[int | None, option("N", "only the last N steps  [default: all]", min=1)] = None,
    output: Annotated[str | None, option("FILE", ".svg or .json file  [default: timeline.svg of the run]")] = None,
) -> int:
    """Draw when the trainer and the engines of a run were busy.

    Reads events.jsonl of the run; of a resumed run it draws the newest attempt. A
    name in .svg makes a picture, one in .json a trace for https://ui.perfetto.dev.

      tidemill timeline addition-1
      tidemill timeline runs/addition-1 --last 10 --output timeline.json
    """
    from tidemill.observe.charts import timeline_svg
    from tidemill.observe.events import past_events
    from tidemill.observe.text import counted
    from tidemill.observe.timeline import last_steps, newest_attempt, overlap, trace

    folder = Path(run) if Path(run).is_dir() else Path("runs") / run
    events = folder / "events.jsonl"
    if not events.is_file():
        found = ", ".join(sorted(file.parent.name for file in Path("runs").glob("*/events.jsonl"))) or "none"
        fix = f"There is no {events}; runs/ has {found}."
        raise ConfigError("RUN", run, "a run below runs/, or its folder", fix)
    activities = last_steps(newest_attempt(past_events(events)), last)
    path = Path(output or folder / "timeline.svg")
    draw = {".svg": timeline_svg, ".json": trace}.get(path.suffix)
    if draw is None:
        raise ConfigError("--output", str(path), "a name that ends in .svg or .json", "The ending chooses the format.")
    remark = f": {counted(len(activities), 'step')}, engines generate during {overlap(activities):.0%} of the updates"
    write(path, draw(activities), remark, parents=True)
    return 0


def ui(
    context: typer.Context,
    output: RunsFolder = "runs",
    port: Annotated[int, option("N", "port; 0 takes a free one")] = 5000,
) -> int:
    """Open the curves and models of all runs.

    Serves the MLflow pages of the runs below a folder, until Ctrl-C.

      tidemill ui
      tidemill ui --output /data/runs --port 5050
    """
    from rich.console import Console

    from tidemill.local.mlflow_ui import serve

    database = registry_of(Path(output).resolve())
    return serve(database, free_port(port), Console(), debug=context.obj)


def say_loading(model: str) -> None:
    """Say what takes long, on standard error: standard output has the answers only."""
    print(f"loading {model} ...", file=sys.stderr, flush=True)


@contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Hide what libraries and their processes print, except with `--debug`."""
    from tidemill.cluster.processes import safe_path
    from tidemill.observe.console import redirected

    with safe_path(), nullcontext() if debug else redirected(os.devnull):
        yield


def write(path: Path, text: str, remark: str = "", *, parents: bool = False) -> None:
    """Write the file that `--output` names, and say so.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", str(path), "a file that can be written", f"{error}.") from error
    print(f"wrote {path}{remark}")


def registry_of(output: Path) -> Path:
    """MLflow's database below a folder of runs.

    Raises:
        ConfigError: it does not exist.
    """
    database = output / "mlflow.db"
    if not database.is_file():
        raise ConfigError("output", str(output), "a folder of runs with mlflow.db", "Name it, or run something first.")
    return database


def free_port(wanted: int) -> int:
    """The wanted port, or any free one for 0.

    Raises:
        ConfigError: it is in use, or out of range.
    """
    if not 0 <= wanted <= MAX_PORT:
        raise ConfigError("port", wanted, f"a number from 0 to {MAX_PORT}", "0 finds a free port.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            fix = f"{error}. Choose another with --port; 0 finds one."
            raise ConfigError("port", wanted, "a free port", fix) from error
        port: int = probe.getsockname()[1]
        return port
