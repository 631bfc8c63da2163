"""The folder of a run: its name, the settings it was started with, and the lock of the folder that it lies in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import yaml

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.errors import ConfigError, RunError
from tidemill.steps.lock import held, label
from tidemill.steps.settings_file import FILE, keep
from tidemill.store.checkpoint import take_name


def fresh(config: RunConfig) -> RunConfig:
    """The settings under the first free name `NAME-1`, `NAME-2`, ..., whose folder is made.

    A name is free when there is no folder of it and nobody has taken it in the store.
    The model is registered under the name as it was, so that the versions of several runs stand together.

    Raises:
        RunError: the folder cannot be made.
        ConfigError: the name becomes too long.
    """
    output = config.output.resolve()
    for number in count(1):
        tree = config.model_dump(mode="json") | {"name": f"{config.name}-{number}", "output": str(output)}
        tree["registry"]["model"] = config.registered_model
        named = parse_config(yaml.safe_dump(tree))
        if named.folder.exists() or not take_name(named):
            continue
        try:
            named.folder.mkdir(parents=True)
        except FileExistsError:
            if not output.is_dir():
                raise RunError(f"output = {output} is not a folder; name another one") from None
            continue
        except OSError as error:
            raise RunError(f"cannot make {named.folder}: {error}. Name another folder with output=...") from error
        return named
    raise AssertionError("count() has no end")


def earlier(name: str, output: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings that the run of this name was started with, and changes of them.

    `output` is where the run lies now; its folder may have been moved.

    Raises:
        ConfigError: there is no such run, or name or output are to change, by which its checkpoints are found.
    """
    path = output.resolve() / name / FILE
    if not path.is_file():
        found = sorted(file.parent.name for file in output.glob(f"*/{FILE}"))
        allowed = f"a run below {output}: {', '.join(found) or 'there is none'}"
        raise ConfigError("resume", name, allowed, "Name one of them, or its folder with --output.")
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("name", "output"):
            fix = "--output says where an earlier run lies." if key == "output" else "Leave it out, or start a new run."
            raise ConfigError(key, value, "what the run has; --resume cannot change it", fix)
    config = load_config(path, [*overrides, f"output={json.dumps(str(output.resolve()))}"])
    if config.name != name:
        raise ConfigError("resume", name, f"the run's own name, {config.name}", "Give its folder that name again.")
    return config


def begin(config: RunConfig) -> Path:
    """Keep the settings and forget how an earlier attempt ended; returns the file of the settings.

    Raises:
        RunError: the folder cannot be written to.
    """
    settings = keep(config)
    forget(config)
    return settings


def forget(config: RunConfig) -> None:
    """Forget how an earlier attempt failed.

    Raises:
        RunError: the folder cannot be written to.
    """
    try:
        Failure.clear(config.folder)
    except OSError as error:
        raise RunError(f"cannot write to {config.folder}: {error}") from error


@contextmanager
def exclusive(output: Path, name: str) -> Iterator[int]:
    """One run at a time below an output folder, because they share its S3 server and MLflow file; yields the lock.

    A run whose launcher was killed still holds it: see `held`.

    Raises:
        RunError: another run holds it, or the folder cannot be made or written to.
    """

    def refusal(holder: str) -> str:
        going_on = f"run {holder} is still going on below {output}"
        return f"{going_on}: wait for it, end it, or start this one elsewhere with output=FOLDER"

    with held(output / "run.lock", refusal) as lock:
        label(lock, holder(name))
        yield lock


def holder(name: str, group: int | None = None) -> str:
    """Whose a lock is.

    Args:
        name: of the run.
        group: of the processes that go on where this one is killed.
    """
    rest = "" if group is None else f"; where that is gone, `kill -- -{group}` ends the rest"
    return f"{name} (process {os.getpid()}{rest})"
