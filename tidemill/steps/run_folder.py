"""The folder of a run: its name, its settings, and what a step records there.

runs/run.lock             held by the run that uses the folder
runs/NAME/config.yaml     the settings
runs/NAME/events.jsonl    phases, optimizer steps, scores
runs/NAME/failure.json    why the last step failed
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tidemill.cluster.processes import locked, write_owner
from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure, record_failure
from tidemill.errors import ConfigError, RunError, TidemillError
from tidemill.observe.events import EventLog, PhaseFailed, PhaseStarted
from tidemill.steps.request import renamed
from tidemill.store.checkpoint import take_name

CONFIG_FILE = "config.yaml"
FIRST_STEP = "validate"


def new_run(config: RunConfig) -> RunConfig:
    """The settings under the first free name `NAME-1`, `NAME-2`, ...; makes the folder of the run.

    A name is free if it has no folder and is not taken in the store. The registered model keeps the original name, so
    that the versions of several runs belong to one model.

    Raises:
        RunError: the folder cannot be made.
        ConfigError: the name becomes too long.
    """
    config = config.model_copy(update={"output": config.output.resolve()})
    for number in count(1):
        named = renamed(config, f"{config.name}-{number}")
        if named.folder.exists() or not take_name(named):
            continue
        try:
            named.folder.mkdir(parents=True)
        except FileExistsError:
            if not config.output.is_dir():
                raise RunError(f"output = {config.output} is not a folder; set another one") from None
            continue
        except OSError as error:
            raise RunError(f"cannot make {named.folder}: {error}. Set another folder with output=...") from error
        return named
    raise AssertionError("count() has no end")


def existing_run(name: str, output: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings that a run was started with, changed by `overrides`.

    `output` is the present folder; a run's folder may have been moved.

    Raises:
        ConfigError: the run does not exist, or an override changes `name` or `output`, by which its checkpoints are
            found.
    """
    path = output.resolve() / name / CONFIG_FILE
    if not path.is_file():
        found = sorted(file.parent.name for file in output.glob(f"*/{CONFIG_FILE}"))
        allowed = f"a run below {output}: {', '.join(found) or 'none exists'}"
        raise ConfigError("resume", name, allowed, "Name one of them, or its folder with --output.")
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("name", "output"):
            fix = (
                "--output names the folder of an existing run." if key == "output" else "Remove it, or start a new run."
            )
            raise ConfigError(key, value, "the value of the run, which --resume cannot change", fix)
    config = load_config(path, [*overrides, f"output={json.dumps(str(output.resolve()))}"])
    if config.name != name:
        raise ConfigError("resume", name, f"the run's own name, {config.name}", "Rename its folder to that.")
    return config


def prepare_folder(config: RunConfig) -> Path:
    """Write the settings and remove what an earlier attempt ended with; returns the settings file.

    Raises:
        RunError: the folder cannot be written to.
    """
    settings = write_settings(config)
    clear_failure(config)
    return settings


def write_settings(config: RunConfig) -> Path:
    """Write the settings and remove the summary of an earlier attempt; returns the settings file.

    Raises:
        RunError: the folder cannot be written to.
    """
    settings = config.folder / CONFIG_FILE
    partial = settings.with_name(f".{CONFIG_FILE}.partial")  # a full disk keeps the settings of an earlier attempt
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(config.to_yaml(), encoding="utf-8")
        partial.replace(settings)
        (config.folder / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {config.folder}: {error}") from error
    return settings


def clear_failure(config: RunConfig) -> None:
    """Remove the failure of an earlier attempt.

    Raises:
        RunError: the folder cannot be written to.
    """
    try:
        Failure.clear(config.folder)
    except OSError as error:
        raise RunError(f"cannot write to {config.folder}: {error}") from error


@contextmanager
def output_lock(output: Path, name: str) -> Iterator[int]:
    """Hold the lock of an output folder, because runs share its S3 server and MLflow file; yields the descriptor.

    Child processes that inherit the descriptor keep the lock after the launcher was killed.

    Raises:
        RunError: another run holds the lock, or the folder cannot be made or written to.
    """

    def refusal(owner: str) -> str:
        return f"run {owner} still uses {output}: wait for it, end it, or start this run with output=FOLDER"

    with locked(output / "run.lock", refusal) as lock:
        write_owner(lock, owner(name))
        yield lock


def owner(name: str, group: int | None = None) -> str:
    """The text in the lock.

    Args:
        name: of the run.
        group: process group that may outlive this process.
    """
    rest = "" if group is None else f"; if that is gone, `kill -- -{group}` ends the rest"
    return f"{name} (process {os.getpid()}{rest})"


@contextmanager
def step(name: str, run: RunConfig) -> Iterator[EventLog]:
    """Write the start of a pipeline step to the events, and its failure to the events and `failure.json`.

    Raises:
        TidemillError: the try before failed permanently.
    """
    refuse_repeated_failure(name, run)
    with EventLog(run.folder / "events.jsonl") as log, record_failure(name, run.folder):
        log.write(PhaseStarted(name))
        try:
            yield log
        except Exception as error:
            log.write(PhaseFailed(name, str(error) or type(error).__name__))
            raise


def refuse_repeated_failure(name: str, run: RunConfig) -> None:
    """Fail at once if the try before failed permanently, because KFP retries a step after any error.

    `validate` always runs, so that corrected settings are checked again. A pod has no record of earlier tries; on
    Kubernetes the watcher decides (`kuberay.attempts`), and every other permanent error occurs early.

    Raises:
        TidemillError: with the message of the try before.
    """
    if name == FIRST_STEP:
        return
    failure = Failure.read(run.folder)
    if failure is not None and failure.step == name and failure.expected and not failure.retryable:
        raise TidemillError(failure.message)
