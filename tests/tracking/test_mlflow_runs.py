"""MLflow runs: their description, their end from outside, and the runs of sweeps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from tidemill.config.run import RunConfig
from tidemill.tracking import mlflow_runs
from tidemill.tracking.mlflow_runs import close_sweep, digest_of, end_killed_run, flatten, open_sweep
from tidemill.tracking.mlflow_server import make_client, open_experiment, runs_page, tracking_uri
from tidemill.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def status_of(tracker: Tracker) -> str:
    return str(tracker.client.get_run(tracker.run_id).info.status)


@pytest.mark.parametrize("error", [MlflowException("API request failed"), ConnectionError("503 of the artifacts")])
def test_a_server_that_is_away_at_the_end_does_not_fail_a_sweep(
    mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    client = make_client(tracking_uri(mlflow_config))
    monkeypatch.setattr(mlflow_runs, "make_client", lambda uri: client)
    open_sweep(mlflow_config, ["addition-v1"])
    monkeypatch.setattr(client, "log_text", refuse)
    close_sweep(mlflow_config, {"addition-v1": 0.5}, "addition-v1", "# Sweep")
    assert f"the sweep addition cannot be logged to MLflow at {tracking_uri(mlflow_config)}: {error}" in caplog.text


def test_mlflow_shows_the_runs_of_an_experiment_of_model_training(mlflow_config: RunConfig) -> None:
    client = make_client(tracking_uri(mlflow_config))
    assert runs_page(client) == "/"  # without a run
    older = client.create_experiment(mlflow_config.tracking.experiment)  # without a kind MLflow's pages guess it
    assert open_experiment(client, mlflow_config) == older
    tracking = mlflow_config.tracking.model_copy(update={"experiment": "newer"})
    newer = open_experiment(client, mlflow_config.model_copy(update={"tracking": tracking}))
    kinds = [client.get_experiment(each).tags["mlflow.experimentKind"] for each in (older, newer)]
    assert kinds == ["custom_model_development"] * 2
    client.create_run(newer, start_time=2)
    client.create_run(older, start_time=1)
    assert runs_page(client) == f"/#/experiments/{newer}/runs?workflowType=machine_learning"


def test_a_kind_that_a_user_chose_for_an_experiment_stays(mlflow_config: RunConfig) -> None:
    client = make_client(tracking_uri(mlflow_config))
    chosen = client.create_experiment(
        mlflow_config.tracking.experiment, tags={"mlflow.experimentKind": "genai_development"}
    )
    open_experiment(client, mlflow_config)
    assert client.get_experiment(chosen).tags["mlflow.experimentKind"] == "genai_development"


def test_a_run_whose_process_was_killed_is_ended_from_outside(mlflow_config: RunConfig) -> None:
    end_killed_run(mlflow_config)  # before MLflow has a run
    tracker = Tracker.start(mlflow_config)
    assert status_of(tracker) == "RUNNING"
    end_killed_run(mlflow_config)
    assert status_of(tracker) == "KILLED"
    tracker.finish("FINISHED")
    end_killed_run(mlflow_config)
    assert status_of(tracker) == "FINISHED"


def test_prompts_are_datasets_by_their_content(mlflow_config: RunConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    data = mlflow_config.data.model_copy(update={"train": str(rows), "held_out": "hf://openai/gsm8k:test"})
    found = []
    for text in ('{"prompt": "1 + 1"}\n', '{"prompt": "1 + 2"}\n'):
        rows.write_text(text)
        tracker = Tracker.start(mlflow_config.model_copy(update={"data": data, "seed": len(found)}))
        tracker.finish("FINISHED")
        inputs = tracker.client.get_run(tracker.run_id).inputs.dataset_inputs
        found.append({each.tags[0].value: each.dataset for each in inputs})
    first, second = found
    assert (first["training"].name, first["training"].source_type) == ("rows.jsonl", "local")
    assert first["training"].digest != second["training"].digest
    assert (first["evaluation"].name, first["evaluation"].source_type) == ("hf://openai/gsm8k:test", "hf")
    assert first["evaluation"].digest == second["evaluation"].digest
    sha = hashlib.sha256(rows.read_bytes()).hexdigest()
    assert digest_of(f"s3://bucket/inputs/{sha}/rows.jsonl") == second["training"].digest


def test_settings_flatten_to_names_and_texts_that_mlflow_takes(mlflow_config: RunConfig) -> None:
    tree: dict[str, Any] = mlflow_config.model_dump(mode="json")
    params = dict(flatten(tree))
    assert params["rewards.0.function"] == "exact_number"
    assert params["rewards.0.options"] == "too long: see config.yaml"
    assert params["data.held_out"] == "null"
    assert params["rollout.stop"] == "[]"
    assert len(params) > 60
