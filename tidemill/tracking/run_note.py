"""A note of its MLflow run in the folder of a run: an attempt that ends before a checkpoint leaves nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from tidemill.config.run import RunConfig

FILE = "mlflow.json"


def note_run(config: RunConfig, run_id: str) -> None:
    """Write down the MLflow run of a run, and the settings that it was made with, which MLflow does not change."""
    path = config.folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps({"run_id": run_id, "settings": config.to_yaml()}), encoding="utf-8")
    partial.replace(path)


def noted_run(config: RunConfig) -> str | None:
    """The MLflow run of an earlier attempt with the same settings, if this folder knows of one."""
    path: Path = config.folder / FILE
    if not path.is_file():
        return None
    note = json.loads(path.read_text(encoding="utf-8"))
    return str(note["run_id"]) if note["settings"] == config.to_yaml() else None
