"""The registration of a trained model, with a real store and registry."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from trained_rig import ANSWER, evaluation, registered, summary

from tidemill.config.run import RunConfig
from tidemill.errors import StoreError
from tidemill.observe.events import EventLog, Notice, PhaseStarted, StepFinished, read_events
from tidemill.observe.page import Curves, chart
from tidemill.observe.report import Summary
from tidemill.protocols import evaluation_from_json
from tidemill.steps.training import track_evaluation
from tidemill.tracking.mlflow_runs import metric_history
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
ARGUMENT_BYTES = 128 * 1024  # of one argument on Linux; KFP hands all inputs of a step over as one


def test_better_model_becomes_a_version_and_the_report_says_so(trained: RunConfig, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    final, model = registered(trained, summary(trained, 0.25), evaluation(0.75), tmp_path)
    assert (final.held_out_after, final.model_version) == (0.75, "addition/1")
    assert final.samples[0].after == "w7"
    assert final.total_seconds >= final.phase_seconds["register"] >= 0
    assert Summary.read(trained.folder / "summary.json") == final
    assert "0.250" in report.read_text() and "addition/1" in report.read_text()
    assert "0.250 &rarr; 0.750" in (tmp_path / "report.html").read_text()
    assert (model.metadata["uri"], model.metadata["version"]) == (final.model_uri, "addition/1")


def test_page_draws_what_mlflow_has_of_the_run(trained: RunConfig, tmp_path: Path) -> None:
    before = summary(trained, 0.25)
    tracker = Tracker.start(trained, before.mlflow_run_id)
    for step, reward in ((1, 0.1), (2, 0.4), (2, 0.5)):  # a restart repeats step 2
        tracker.log(step, {"reward/mean": reward})
        time.sleep(0.01)
    tracker.finish("FINISHED")
    assert metric_history(trained, str(before.mlflow_run_id), "reward/mean") == [(1, 0.1), (2, 0.5)]
    registered(trained, before, evaluation(0.75), tmp_path)
    assert chart(Curves([(1, 0.1), (2, 0.5)], [])) in (tmp_path / "report.html").read_text()


def test_curve_of_an_unreachable_server_is_empty(trained: RunConfig) -> None:
    away = trained.model_copy(update={"tracking": trained.tracking.model_copy(update={"uri": "http://127.0.0.1:1"})})
    assert metric_history(away, "run", "reward/mean") == []


def test_model_artifact_points_at_the_weights_and_holds_none(trained: RunConfig, tmp_path: Path) -> None:
    final, model = registered(trained, summary(trained, 0.25), evaluation(0.75), tmp_path)
    pointer = json.loads(Path(model.path).read_text())
    assert pointer == model.metadata
    assert pointer["uri"] == final.model_uri and pointer["uri"].startswith("s3://")
    assert Path(model.path).stat().st_size < 4096


def test_mlflow_run_gets_the_final_score_the_answers_and_the_report(trained: RunConfig, tmp_path: Path) -> None:
    before = summary(trained, 0.25)
    evaluated = evaluation_from_json(evaluation(0.75))
    assert evaluated is not None
    for _ in range(2):  # KFP may try the step again
        track_evaluation(trained, before, evaluated)
    registered(trained, before, evaluation(0.75), tmp_path)
    client, run_id = make_client(tracking_uri(trained)), before.mlflow_run_id
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "evaluation/score")] == [(25, 0.75)]
    folder = Path(client.download_artifacts(run_id, "", str(tmp_path)))
    assert (folder / "report.md").read_text() == (tmp_path / "report.md").read_text()
    assert (folder / "report.html").read_text() == (tmp_path / "report.html").read_text()
    table = json.loads((folder / "answers/000025.json").read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == ANSWER


def test_repeated_registration_makes_no_second_version(trained: RunConfig, tmp_path: Path) -> None:
    before = summary(trained, 0.25)
    versions = [registered(trained, before, evaluation(0.75), tmp_path)[0] for _ in range(2)]
    assert {final.model_version for final in versions} == {"addition/1"}


def test_worse_model_is_not_registered_and_the_reason_is_told(trained: RunConfig, tmp_path: Path) -> None:
    final, _ = registered(trained, summary(trained, 0.75), evaluation(0.25), tmp_path)
    assert final.model_version is None
    fell = "the held-out score fell from 0.75 to 0.25"
    assert final.why("model_version") == fell
    assert read_events(trained.folder / "events.jsonl")[-1] == Notice(f"no model version: {fell}")


def test_model_without_an_mlflow_run_is_not_registered(trained: RunConfig, tmp_path: Path) -> None:
    final, _ = registered(trained, replace(summary(trained, 0.25), mlflow_run_id=None), evaluation(0.75), tmp_path)
    assert final.reason("model_version") == "(not tracked)"


def away(run: RunConfig) -> RunConfig:
    """The run with a server that does not answer."""
    return run.model_copy(update={"tracking": run.tracking.model_copy(update={"uri": "http://127.0.0.1:1"})})


def test_registration_waits_for_an_unreachable_server(
    trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    before = summary(trained, 0.25)
    with pytest.raises(StoreError, match="does not answer within 0 s"):
        registered(away(trained), before, evaluation(0.75), tmp_path, outage_s=0.0)


def test_what_the_gate_refuses_needs_no_server(
    trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    untracked = replace(summary(trained, 0.75), mlflow_run_id=None)
    final, _ = registered(away(trained), untracked, evaluation(0.75), tmp_path, outage_s=0.0)
    assert final.model_version is None


def test_total_time_is_that_of_all_launches_without_the_pauses(trained: RunConfig, tmp_path: Path) -> None:
    began = time.time() - 10_000
    with EventLog(trained.folder / "events.jsonl") as log:
        for name, at in (("validate", 0), ("provision", 10), ("train", 40)):
            log.write(PhaseStarted(name, began + at))
        log.write(StepFinished(1, 2, 1, 60.0, {}, began + 100))  # killed after this step
        for name, at in (("validate", 9900), ("provision", 9910), ("train", 9920), ("evaluate", 9980)):
            log.write(PhaseStarted(name, began + at))
    final, _ = registered(trained, summary(trained, 0.25), evaluation(0.75), tmp_path)
    assert final.total_seconds == pytest.approx(100 + 100, abs=20)
    assert final.phase_seconds["validate"] == pytest.approx(10)


def test_total_time_of_a_run_in_pods_includes_the_steps_after_the_training(trained: RunConfig, tmp_path: Path) -> None:
    final, _ = registered(trained, replace(summary(trained, 0.25), total_seconds=500.0), evaluation(0.75), tmp_path)
    assert final.total_seconds == pytest.approx(500.0 + final.phase_seconds["register"])
