"""The command line: `tidemill run | train | evaluate | generate | compile | ui`.

Heavy libraries are imported by the command that needs them, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from tidemill import __version__
from tidemill.errors import ConfigError, EngineError, RunError, TidemillError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

DESCRIPTION = "Asynchronous reinforcement learning of language models, as a pipeline."
EPILOG = """
A run is one YAML file. Start from one in examples/, and see docs/configuration.md for every key.

  tidemill run examples/addition.yaml                    the whole pipeline, on this machine
  tidemill run examples/addition.yaml trainer.steps=50   the same with another setting
  tidemill ui                                            curves and models of all runs, in the browser
"""
RUN = """
Steps: validate, provision, train, evaluate, register; teardown at the end, whatever happens. Every start is a new run
with a folder of its own, runs/NAME-1, runs/NAME-2 and so on, where config.yaml, log.txt, events.jsonl, summary.json
and the trained model stand. Ctrl-C ends everything; --resume goes on from the newest checkpoint.

  tidemill run examples/addition.yaml
  tidemill run examples/addition.yaml seed=3 trainer.learning_rate=2.0e-5 rewards.0.timeout_s=5
  tidemill run examples/addition.yaml model=/models/mine output=/data/runs
  tidemill run --resume addition-1
"""
TRAIN = """
Training alone: no pipeline, no registry. With RAY_ADDRESS set it joins that Ray, else it starts one. A second start
under the same name goes on from the newest checkpoint.

  tidemill train examples/addition.yaml name=probe trainer.steps=5
"""
EVALUATE = """
Answers the held-out prompts of a run file greedily and prints score and answers.

  tidemill evaluate examples/addition.yaml                          the model that the file names
  tidemill evaluate examples/addition.yaml model=models:/addition/1 a registered version
"""
GENERATE = """
MODEL is a local folder, s3://BUCKET/PREFIX, models:/NAME/VERSION of the registry, or a Hugging Face name.

  tidemill generate models:/addition/1 "Compute 2 + 6. Reply with the number only."
  tidemill generate runs/addition-1/model "Compute 2 + 6." "Compute 9 + 9." --temperature 1
"""
COMPILE = """
Writes the pipeline as KFP takes it: upload the file in its UI, or `kfp pipeline create -p tidemill FILE`. Its one
parameter `config` is the text of a run file.

  tidemill compile --output post_training.yaml
"""
UI = """
Serves the MLflow pages of all runs below a folder, until Ctrl-C.

  tidemill ui
  tidemill ui --output /data/runs --port 5050
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    parser = argparse.ArgumentParser("tidemill", description=DESCRIPTION, epilog=EPILOG, formatter_class=Help)
    parser.add_argument("--version", action="version", version=f"tidemill {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = add(commands, "run", "run the whole pipeline on this machine", RUN)
    run.add_argument("file", nargs="?", help="the run, as YAML")
    run.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="settings that replace those of the file")
    run.add_argument("--resume", metavar="NAME", help="go on with this run instead of starting one")
    run.add_argument("--output", default="runs", help="with --resume: the folder of runs (default: runs)")

    train = add(commands, "train", "train only, without the pipeline around it", TRAIN)
    evaluate = add(commands, "evaluate", "score a model on held-out prompts", EVALUATE)
    for command in (train, evaluate):
        command.add_argument("file", help="the run, as YAML")
        command.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="settings that replace the file's")

    generate = add(commands, "generate", "let a model answer", GENERATE)
    generate.add_argument("model", help="which model")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="what to answer")
    generate.add_argument("--system", help="system message")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default: 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    generate.add_argument("--output", default="runs", help="folder of runs with store and registry (default: runs)")
    generate.add_argument("--endpoint", default="embedded", help="S3 server (default: the embedded one below --output)")
    generate.add_argument("--tracking", help="MLflow server (default: the SQLite file below --output)")

    compile_ = add(commands, "compile", "write the pipeline for KFP", COMPILE)
    compile_.add_argument("--output", default="post_training.yaml", help="file (default: post_training.yaml)")
    compile_.add_argument("--check", metavar="FILE", help="only say whether FILE is what would be written")

    ui = add(commands, "ui", "open curves and models of all runs", UI)
    ui.add_argument("--output", default="runs", help="folder of runs (default: runs)")
    ui.add_argument("--port", type=int, default=5000, help="port, 0 takes a free one (default: 5000)")
    return parser


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples."""


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str, more: str
) -> argparse.ArgumentParser:
    """One command."""
    return commands.add_parser(name, help=does, description=does.capitalize() + ".", epilog=more, formatter_class=Help)


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline."""
    from rich.console import Console

    from tidemill.config import load_config
    from tidemill.launch import earlier, fresh, launch

    need_kfp()
    overrides = list(arguments.overrides)
    if arguments.resume:
        overrides = [*filter(None, [arguments.file]), *overrides]
        config = earlier(arguments.resume, Path(arguments.output), overrides)
    elif arguments.file:
        config = fresh(load_config(arguments.file, overrides))
    else:
        raise ConfigError(
            "file", None, "a run file, or --resume NAME", "For example: tidemill run examples/addition.yaml"
        )
    return launch(config, Console())


def train(arguments: argparse.Namespace) -> int:
    """The engine alone."""
    from rich.console import Console

    from tidemill.config import load_config

    provider = ["cluster.provider=existing"] if os.environ.get("RAY_ADDRESS") else []
    config = load_config(arguments.file, [*provider, *arguments.overrides])
    from tidemill.launch import show
    from tidemill.run import train as run_train

    config.folder.mkdir(parents=True, exist_ok=True)
    show(config, run_train(config), Console())
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Score and answers of a model."""
    from tidemill.config import load_config
    from tidemill.steps import score

    config = load_config(arguments.file, arguments.overrides)
    with quiet(arguments.debug):
        evaluation = score(config, config.model)
    for answer in evaluation.answers:
        print(f"{answer.reward:5.2f}  {answer.prompt!r} -> {answer.response!r} (expected {answer.expected!r})")
    for reason, number in evaluation.skipped.items():
        print(f"skipped {number}: {reason}")
    print(f"score {evaluation.score:.3f} over {len(evaluation.answers)} prompts")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Answers of a model, one a line block."""
    from tidemill.config import StoreConfig
    from tidemill.rollout.generate import generate_text
    from tidemill.store.locate import Locator

    output = Path(arguments.output).resolve()
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
    for answer in answers:
        print(answer)
    return 0


@contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Keep the chatter of libraries and of their processes off the screen, unless it is asked for."""
    if debug:
        yield
        return
    sys.stdout.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
    try:
        yield
        gc.collect()  # objects that say goodbye do so now
    finally:
        sys.stdout.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def compile_pipeline(arguments: argparse.Namespace) -> int:
    """The pipeline as a file, or whether a file is current."""
    need_kfp()
    if not arguments.check:
        compile_to(Path(arguments.output))
        print(f"wrote {arguments.output}")
        return 0
    with TemporaryDirectory() as folder:
        fresh = Path(folder) / "pipeline.yaml"
        compile_to(fresh)
        golden = Path(arguments.check)
        if golden.is_file() and golden.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"):
            return 0
    raise RunError(f"{arguments.check} is out of date: run `make golden`")


def compile_to(path: Path) -> None:
    """Compile in a process of its own: only the pipelines know KFP."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill_pipelines.compile", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"the pipeline cannot be written to {path}:\n{done.stderr.strip()}")


def ui(arguments: argparse.Namespace) -> NoReturn:
    """Become the MLflow server."""
    database = Path(arguments.output).resolve() / "mlflow.db"
    if not database.is_file():
        raise ConfigError(
            "output", arguments.output, "a folder of runs with mlflow.db", "Name it, or run something first."
        )
    port = free_port(arguments.port)
    print(f"MLflow of {database.parent}: http://127.0.0.1:{port} (ready in some seconds; Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"])


def free_port(wanted: int) -> int:
    """The wanted port, or any for 0.

    Raises:
        ConfigError: somebody listens on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "port", wanted, "a free port", f"{error}. Take another with --port; 0 finds one."
            ) from error
        port: int = probe.getsockname()[1]
        return port


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
    "ui": ui,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
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
