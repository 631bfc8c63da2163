"""The commands for models."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from tidemill.cli.need import need_working_folder
from tidemill.config.address import TRACKING, is_tracking
from tidemill.errors import ConfigError
from tidemill.observe.console import redirected
from tidemill.observe.text import counted

MAX_PORT = 65535


def evaluate(arguments: argparse.Namespace) -> int:
    """Score and answers of a model."""
    from tidemill.config.reading import load_config
    from tidemill.steps.preflight import check_inputs, check_model
    from tidemill.steps.provider import score

    need_working_folder()
    config = load_config(arguments.file, arguments.overrides)
    if config.data.held_out is None:
        raise ConfigError("data.held_out", None, "a file of prompts", "Name one to score a model on.")
    check_inputs(config)
    check_model(config)
    say_loading(config.model)
    with quiet(arguments.debug):
        evaluation = score(config, config.model)
    for answer in evaluation.answers:
        print(f"{answer.reward:5.2f}  {answer.prompt!r} -> {answer.response!r} (expected {answer.expected!r})")
    for reason, number in evaluation.skipped.items():
        print(f"skipped {number}: {reason}")
    print(f"score {evaluation.score:.3f} over {counted(len(evaluation.answers), 'prompt')}")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Answers of a model, each below its prompt if there are several."""
    from tidemill.config.storage import StoreConfig
    from tidemill.models.locate import Locator
    from tidemill.rollout.generate import generate_text

    output = Path(arguments.output).resolve()
    if arguments.tracking and not is_tracking(arguments.tracking):
        raise ConfigError("--tracking", arguments.tracking, TRACKING, "Mend it, or leave it out.")
    if arguments.model.startswith("models:/") and not arguments.tracking:
        registry_of(output)
    locator = Locator(
        StoreConfig(endpoint=arguments.endpoint), output, arguments.tracking or f"sqlite:///{output / 'mlflow.db'}"
    )
    say_loading(arguments.model)
    with quiet(arguments.debug), TemporaryDirectory(prefix="tidemill-model-") as folder:
        answers = generate_text(
            locator.fetch_model(arguments.model, Path(folder)).path,
            arguments.prompts,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            system_prompt=arguments.system,
        )
    for prompt, answer in zip(arguments.prompts, answers, strict=True):
        print(answer if len(answers) == 1 else f"> {prompt}\n{answer}\n")
    return 0


def say_loading(model: str) -> None:
    """Tell a person what takes so long, apart from the answers."""
    print(f"loading {model} ...", file=sys.stderr, flush=True)


def quiet(debug: bool) -> AbstractContextManager[object]:
    """Keep the chatter of libraries and of their processes off the screen, unless it is asked for."""
    return nullcontext() if debug else redirected(os.devnull)


def ui(arguments: argparse.Namespace) -> int:
    """The pages of MLflow, until they are ended."""
    from rich.console import Console

    from tidemill.local.mlflow_pages import serve

    database = registry_of(Path(arguments.output).resolve())
    return serve(database, free_port(arguments.port), Console(), debug=arguments.debug)


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
