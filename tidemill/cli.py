"""The command line, `tidemill COMMAND`; `arguments.py` lists the commands.

Heavy libraries are imported by the command that needs them, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from tidemill.arguments import parse
from tidemill.chatter import diverted
from tidemill.errors import ConfigError, EngineError, RunError, TidemillError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
MAX_PORT = 65535


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline."""
    from rich.console import Console

    from tidemill.launch import go_on, start
    from tidemill.run_file import load_config
    from tidemill.run_folder import earlier

    need_kfp()
    if arguments.resume:
        config = earlier(arguments.resume, Path(arguments.output or "runs"), resumed_overrides(arguments))
        return go_on(config, Console())
    if arguments.file:
        return start(load_config(arguments.file, [*arguments.overrides, *output_override(arguments)]), Console())
    raise ConfigError("file", None, "a run file, or --resume NAME", "For example: tidemill run examples/addition.yaml")


def resumed_overrides(arguments: argparse.Namespace) -> list[str]:
    """Settings behind `--resume`, where the first one stands in the place of the file.

    Raises:
        ConfigError: it is a file.
    """
    first = [] if arguments.file is None else [arguments.file]
    if first and ("=" not in first[0] or Path(first[0]).is_file()):
        fix = f"`tidemill run --resume {arguments.resume}` reads the settings that the run was started with."
        raise ConfigError("file", first[0], "a file or --resume, not both", fix)
    return [*first, *arguments.overrides]


def output_override(arguments: argparse.Namespace) -> list[str]:
    """`--output` as a setting.

    Raises:
        ConfigError: the setting is there too.
    """
    if arguments.output is None:
        return []
    if any(override.partition("=")[0] == "output" for override in arguments.overrides):
        raise ConfigError("output", arguments.output, "either --output or output=, not both", "Leave one of them out.")
    return [f"output={json.dumps(arguments.output)}"]


def train(arguments: argparse.Namespace) -> int:
    """The engine alone."""
    from tidemill.run_file import load_config

    provider = ["cluster.provider=existing"] if os.environ.get("RAY_ADDRESS") else []
    config = load_config(arguments.file, [*provider, *arguments.overrides])
    from tidemill.attendance import attend
    from tidemill.run import train as run_train
    from tidemill.store.locate import pin_model

    return attend(pin_model(config), run_train, debug=arguments.debug)


def evaluate(arguments: argparse.Namespace) -> int:
    """Score and answers of a model."""
    from tidemill.preflight import check_inputs, check_model
    from tidemill.provider import score
    from tidemill.run_file import load_config

    config = load_config(arguments.file, arguments.overrides)
    if config.data.held_out is None:
        raise ConfigError("data.held_out", None, "a file of prompts", "Name one to score a model on.")
    check_inputs(config)
    check_model(config)
    with quiet(arguments.debug):
        evaluation = score(config, config.model)
    for answer in evaluation.answers:
        print(f"{answer.reward:5.2f}  {answer.prompt!r} -> {answer.response!r} (expected {answer.expected!r})")
    for reason, number in evaluation.skipped.items():
        print(f"skipped {number}: {reason}")
    print(f"score {evaluation.score:.3f} over {len(evaluation.answers)} prompts")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Answers of a model, each below its prompt if there are several."""
    from tidemill.rollout.generate import generate_text
    from tidemill.sections import StoreConfig
    from tidemill.store.locate import Locator

    output = Path(arguments.output).resolve()
    if arguments.model.startswith("models:/") and not arguments.tracking:
        registry_of(output)
    locator = Locator(
        StoreConfig(endpoint=arguments.endpoint), output, arguments.tracking or f"sqlite:///{output / 'mlflow.db'}"
    )
    with quiet(arguments.debug), TemporaryDirectory(prefix="tidemill-model-") as folder:
        answers = generate_text(
            locator.bring(arguments.model, Path(folder)).path,
            arguments.prompts,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            system_prompt=arguments.system,
        )
    for prompt, answer in zip(arguments.prompts, answers, strict=True):
        print(answer if len(answers) == 1 else f"> {prompt}\n{answer}\n")
    return 0


def quiet(debug: bool) -> AbstractContextManager[object]:
    """Keep the chatter of libraries and of their processes off the screen, unless it is asked for."""
    return nullcontext() if debug else diverted(os.devnull)


def compile_pipeline(arguments: argparse.Namespace) -> int:
    """The pipeline as a file, or whether a file is current; or the manifests of a run."""
    if arguments.manifests:
        return print_manifests(arguments)
    if arguments.overrides:
        fix = "The pipeline takes settings when it is run."
        raise ConfigError("override", arguments.overrides[0], "nothing without --manifests", fix)
    need_kfp()
    if not arguments.check:
        path = arguments.output or f"{arguments.pipeline}.yaml"
        compile_to(arguments.pipeline, Path(path))
        print(f"wrote {path}")
        return 0
    with TemporaryDirectory() as folder:
        fresh = Path(folder) / "pipeline.yaml"
        compile_to(arguments.pipeline, fresh)
        golden = Path(arguments.check)
        if golden.is_file() and golden.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"):
            return 0
    raise RunError(f"{arguments.check} is out of date: run `make golden`")


def print_manifests(arguments: argparse.Namespace) -> int:
    """What a run makes in a Kubernetes cluster; nothing is sent.

    Raises:
        ConfigError: --check is there too, or the file cannot be written.
    """
    from tidemill.kuberay.show import manifests
    from tidemill.run_file import load_config

    if arguments.check:
        fix = "--check compares the pipeline."
        raise ConfigError("check", arguments.check, "either --check or --manifests, not both", fix)
    text = manifests(load_config(arguments.manifests, arguments.overrides))
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", arguments.output, "a file that can be written", f"{error}.") from error
    print(f"wrote {arguments.output}")
    return 0


def compile_to(pipeline: str, path: Path) -> None:
    """Compile in a process of its own: only the pipelines know KFP."""
    command = [sys.executable, "-m", "tidemill_pipelines.compile", pipeline, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the pipeline cannot be written to {path}:\n{done.stderr.strip()}")


def submit(arguments: argparse.Namespace) -> int:
    """A run on KFP."""
    from tidemill.submission import submit as submit_run

    need_kfp()
    return submit_run(arguments)


def schedule(arguments: argparse.Namespace) -> int:
    """Runs on KFP, again and again."""
    from tidemill.submission import schedule as schedule_runs

    need_kfp()
    return schedule_runs(arguments)


def convert_verl(arguments: argparse.Namespace) -> int:
    """A run file from a verl script."""
    from tidemill.verl.convert import convert

    try:
        script = Path(arguments.script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("SCRIPT", arguments.script, "a readable shell script", f"{error}.") from error
    print(convert(script, arguments.settings, os.environ), end="")
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    """The picture of a run, or its trace."""
    from tidemill.observe.events import read_events
    from tidemill.observe.timeline import last_steps, newest_attempt, overlap, svg, trace

    folder = Path(arguments.run) if Path(arguments.run).is_dir() else Path("runs") / arguments.run
    events = folder / "events.jsonl"
    if not events.is_file():
        raise ConfigError("RUN", arguments.run, "a run below runs/, or its folder", f"There is no {events}.")
    activities = last_steps(newest_attempt(read_events(events)), arguments.last)
    path = Path(arguments.output or folder / "timeline.svg")
    draw = {".svg": svg, ".json": trace}.get(path.suffix)
    if draw is None:
        raise ConfigError("output", str(path), "a name that ends in .svg or .json", "The end chooses the format.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(activities), encoding="utf-8")
    print(f"wrote {path}: {len(activities)} steps, engines generate during {overlap(activities):.0%} of the updates")
    return 0


def ui(arguments: argparse.Namespace) -> NoReturn:
    """Become the MLflow server."""
    database = registry_of(Path(arguments.output).resolve())
    port = free_port(arguments.port)
    print(f"MLflow of {database.parent}: http://127.0.0.1:{port} (ready in some seconds; Ctrl-C ends it)", flush=True)
    artifacts = (database.parent / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    options = ["--artifacts-destination", artifacts, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [*command, *options])


def registry_of(output: Path) -> Path:
    """MLflow's file below a folder of runs.

    Raises:
        ConfigError: there is none, and none is to be made.
    """
    database = output / "mlflow.db"
    if not database.is_file():
        raise ConfigError("output", str(output), "a folder of runs with mlflow.db", "Name it, or run something first.")
    return database


def free_port(wanted: int) -> int:
    """The wanted port, or any for 0.

    Raises:
        ConfigError: somebody listens on it, or it is none.
    """
    if not 0 <= wanted <= MAX_PORT:
        raise ConfigError("port", wanted, f"a number from 0 to {MAX_PORT}", "0 finds a free port.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ConfigError(
                "port", wanted, "a free port", f"{error}. Take another with --port; 0 finds one."
            ) from error
        port: int = probe.getsockname()[1]
        return port


def remote(arguments: argparse.Namespace) -> int:
    """A command for runs on Kubernetes."""
    if importlib.util.find_spec("kubernetes") is None:
        raise RunError("this command needs the Kubernetes client: pip install 'tidemill[pipelines]'")
    from rich.console import Console

    from tidemill import remote as commands
    from tidemill.kuberay.client import KubernetesCluster
    from tidemill.kuberay.release import own_namespace
    from tidemill.sections import KubernetesConfig

    does = {"status": commands.status, "logs": commands.logs, "stop": commands.stop, "reap": commands.reap_runs}
    namespace = arguments.namespace or own_namespace() or KubernetesConfig().namespace
    return does[arguments.command](arguments, KubernetesCluster.connect(namespace), Console())


def need_kfp() -> None:
    """Say what to install where KFP is missing."""
    if importlib.util.find_spec("kfp") is None:
        raise RunError("this command needs KFP: pip install 'tidemill[pipelines]'")


COMMANDS = {
    "run": run,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "compile": compile_pipeline,
    "submit": submit,
    "schedule": schedule,
    "convert-verl": convert_verl,
    "status": remote,
    "logs": remote,
    "stop": remote,
    "reap": remote,
    "timeline": timeline,
    "ui": ui,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    arguments = parse(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except TidemillError as error:
        if arguments.debug:
            raise
        hint = " (`tidemill --debug ...` shows the output of the engine)" if isinstance(error, EngineError) else ""
        print(f"tidemill: {error}{hint}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
