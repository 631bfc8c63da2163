"""`config.yaml` in the folder of a run: the settings that it was made with, and that it goes on with."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.errors import RunError

FILE = "config.yaml"


def keep(config: RunConfig) -> Path:
    """Write the settings, and forget what an earlier attempt came to; returns the file.

    Raises:
        RunError: the folder cannot be written to.
    """
    settings = config.folder / FILE
    partial = settings.with_name(f".{FILE}.partial")  # a full disk must not cost the settings of an earlier attempt
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(config.to_yaml(), encoding="utf-8")
        partial.replace(settings)
        (config.folder / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {config.folder}: {error}") from error
    return settings


def accept(config: RunConfig) -> None:
    """Have a run go on with these settings from now on; of a run in a pod nothing is kept here.

    Raises:
        RunError: the folder cannot be written to.
    """
    if (config.folder / FILE).is_file():
        keep(config)
