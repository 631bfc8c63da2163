"""A trained run without a training: its settings, its summary, and its registration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.observe.report import Sample, Summary
from tidemill.retry import OUTAGE_S
from tidemill.steps.register import register
from tidemill.tracking.tracker import Tracker

EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
ANSWER = {"prompt": "w5 w6", "response": "w7", "expected": "7", "reward": 1.0}


@pytest.fixture
def trained(tmp_path: Path, empty_mlflow: Path) -> RunConfig:
    """A run of a tiny model, with two held-out prompts."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_mlflow, tmp_path / "runs/mlflow.db")
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text('{"prompt": "w5 w6", "answer": "7"}\n{"prompt": "w8", "answer": "9"}\n')
    overrides = ("registry.min_score=null", "rollout.dtype=float32", f"data.held_out={prompts}", "registry.alias=best")
    return load_config(EXAMPLE, [f"output={tmp_path / 'runs'}", f"model={tmp_path / 'model'}", *overrides])


def summary(run: RunConfig, before: float | None, model_uri: str = "s3://tidemill/runs/addition/model/25") -> Summary:
    tracker = Tracker.start(run)
    tracker.finish("FINISHED")
    return Summary(
        steps=25,
        held_out_before=before,
        held_out_after=None,
        train_seconds=100.0,
        total_seconds=1.0,
        tokens_per_second=50.0,
        trainer_idle=0.1,
        rollouter_idle=0.2,
        max_age=1,
        peak_memory_bytes=2**30,
        checkpoint_uri="s3://tidemill/runs/addition/checkpoints/00000025",
        model_uri=model_uri,
        model_version=None,
        mlflow_run_id=tracker.run_id,
        samples=(Sample("w5 w6", "w9", None, "7"),),
    )


class Model:
    """A KFP artifact of a model."""

    def __init__(self, path: Path) -> None:
        self.path, self.metadata = str(path), {}


def registered(
    run: RunConfig, trained: Summary, evaluated: str, folder: Path, outage_s: float = OUTAGE_S
) -> tuple[Summary, Model]:
    """Register; returns the summary and the artifact. The folder gets report.md, report.html and model.json."""
    model = Model(folder / "model.json")
    files = (str(folder / "report.md"), str(folder / "report.html"))
    final = register(run.to_yaml(), trained.to_json(), evaluated, *files, model, outage_s=outage_s)
    return Summary.from_json(final), model


def evaluation(score: float) -> str:
    return json.dumps({"version": 0, "score": score, "answers": [ANSWER], "skipped": {}})
