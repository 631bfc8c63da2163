import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from mlflow.exceptions import MlflowException

from tidemill.config.kubernetes import ClusterConfig
from tidemill.config.run import RunConfig
from tidemill.driver.observer import RunObserver
from tidemill.errors import ConfigError, RunError
from tidemill.observe.events import EventLog, Notice, read_events
from tidemill.protocols import Evaluation
from tidemill.retry import wait_for
from tidemill.tracking.metric_writer import Unwritten
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.tracker import TrackedRun, Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def history(tracker: Tracker, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in tracker.client.get_metric_history(tracker.run_id, key)]


def artifact(tracker: Tracker, name: str, tmp_path: Path) -> str:
    return Path(tracker.client.download_artifacts(tracker.run_id, name, str(tmp_path))).read_text()


def test_settings_metrics_and_artifacts_arrive(run_config: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker.start(run_config)
    for step in range(3):
        tracker.log(step, {"actor/loss": step / 2, "response/p95 tokens": 7})
    tracker.log(3, {"actor/loss": math.nan})
    tracker.log_text("# Report", "report.md")
    tracker.log_table("answers/00000.json", {"prompt": ["1+1"], "response": ["2"]})
    (tmp_path / "plot.svg").write_text("<svg/>")
    tracker.log_artifact(tmp_path / "plot.svg", "plots")
    assert tracker.finish("FINISHED") == Unwritten()
    run = tracker.client.get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "addition")
    assert (run.data.params["trainer.steps"], run.data.params["data.train"]) == ("4", "train.jsonl")
    assert run.data.tags["tidemill.model"] == "some/model"
    assert history(tracker, "response/p95 tokens") == [(0, 7.0), (1, 7.0), (2, 7.0)]
    assert len(history(tracker, "actor/loss")) == 4
    assert artifact(tracker, "config.yaml", tmp_path) == run_config.to_yaml()
    assert json.loads(artifact(tracker, "answers/00000.json", tmp_path)) == {
        "columns": ["prompt", "response"],
        "data": [["1+1", "2"]],
    }
    assert "answers/00000.json" in run.data.tags["mlflow.loggedArtifacts"]
    assert (run_config.output / "mlartifacts").is_dir()


def test_a_restart_continues_the_same_run(mlflow_config: RunConfig) -> None:
    first = Tracker.start(mlflow_config)
    first.log(1, {"loss": 1.0})
    first.finish("FAILED")
    changed = mlflow_config.model_copy(update={"model": "renamed"})
    second = Tracker.start(changed, first.run_id)
    assert second.client.get_run(first.run_id).info.status == "RUNNING"
    second.log(2, {"loss": 0.5})
    second.finish("FINISHED")
    assert second.run_id == first.run_id
    assert history(second, "loss") == [(1, 1.0), (2, 0.5)]
    assert second.client.get_run(first.run_id).data.params["model"] == "some/model"


def test_a_repeated_step_is_logged_once(mlflow_config: RunConfig) -> None:
    killed = Tracker.start(mlflow_config)
    for step in range(3):
        killed.log(step, {"time/step": 1.0, "loss": 1.0 - step / 10})
    killed.log_evaluation(1, Evaluation(1, 0.5, ()))
    killed.writer.close(30)
    resumed = Tracker.start(mlflow_config, killed.run_id)
    for step in (1, 2, 3):
        resumed.log(step, {"time/step": 1.0, "loss": 0.5})
    for step in (1, 2):
        resumed.log_evaluation(step, Evaluation(step, 0.75, ()))
    assert resumed.finish("FINISHED") == Unwritten()
    assert history(resumed, "loss") == [(0, 1.0), (1, 0.9), (2, 0.8), (3, 0.5)]
    assert [step for step, _ in history(resumed, "evaluation/score")] == [1, 2]


def test_a_repeated_step_that_waits_for_the_server_is_logged_once(mlflow_config: RunConfig) -> None:
    """An attempt that is killed while MLflow is away leaves its last steps in a file, which the next one sends."""
    started = Tracker.start(mlflow_config)
    started.log(1, {"time/step": 1.0})
    started.finish("FAILED")
    nobody = make_client(f"http://127.0.0.1:{free_port()}")
    killed = Tracker(TrackedRun(nobody, mlflow_config, started.run_id, opened=True), mlflow_config.folder)
    killed.log(2, {"time/step": 1.0})
    killed.log_evaluation(2, Evaluation(2, 0.5, ()))
    assert killed.finish("KILLED", timeout_s=0.1).spooled == 2
    resumed = Tracker.start(mlflow_config, started.run_id)
    for step in (2, 3):
        resumed.log(step, {"time/step": 2.0})
        resumed.log_evaluation(step, Evaluation(step, 0.75, ()))
    assert resumed.finish("FINISHED") == Unwritten()
    assert history(resumed, "time/step") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert history(resumed, "evaluation/score") == [(2, 0.5), (3, 0.75)]


def test_the_run_of_the_environment_is_used(mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(tracking_uri(mlflow_config))
    artifacts = str(mlflow_config.output / "artifacts")
    made = client.create_run(client.create_experiment("pipeline", artifact_location=artifacts))
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    tracker = Tracker.start(mlflow_config)
    tracker.finish("FINISHED")
    assert tracker.run_id == made.info.run_id
    assert client.get_run(tracker.run_id).data.params["trainer.steps"] == "4"


def test_a_run_that_was_deleted_is_replaced(mlflow_config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    first = Tracker.start(mlflow_config)
    first.finish("FINISHED")
    first.client.delete_run(first.run_id)
    for gone in (first.run_id, "0" * 32):
        tracker = Tracker.start(mlflow_config, gone)
        tracker.finish("FINISHED")
        assert tracker.run_id != gone
        assert gone in caplog.text


def test_metrics_of_a_dead_server_are_replayed_by_the_resume(mlflow_config: RunConfig) -> None:
    started = Tracker.start(mlflow_config)
    started.log(1, {"loss": 3.0})
    started.finish("FAILED")
    nobody = make_client(f"http://127.0.0.1:{free_port()}")
    dead = Tracker(TrackedRun(nobody, mlflow_config, started.run_id, opened=True), mlflow_config.folder)
    dead.log(2, {"loss": 2.0})
    dead.log(3, {"loss": 1.0})
    unwritten = dead.finish("FINISHED", timeout_s=0.1)
    assert (unwritten.spooled, unwritten.dropped) == (2, 0)
    resumed = Tracker.start(mlflow_config, started.run_id)
    assert resumed.finish("FINISHED") == Unwritten()
    assert history(resumed, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_batch_sent_twice_counts_once(mlflow_config: RunConfig) -> None:
    tracker = Tracker.start(mlflow_config)
    tracker.log(1, {"a": 1.0, "b": 2.0})
    with tracker.writer.changed:
        sent = list(tracker.writer.points)
    tracker.finish("FINISHED")
    for _ in range(2):
        tracker.send(sent)
    assert (history(tracker, "a"), history(tracker, "b")) == ([(1, 1.0)], [(1, 2.0)])


def test_an_unreachable_server_is_a_setting_to_fix(mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking = mlflow_config.tracking.model_copy(update={"uri": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(ConfigError, match=r"tracking\.uri = 'http"):
        Tracker.start(mlflow_config.model_copy(update={"tracking": tracking}))


class FlakyClient:
    """A client of a server that fails the n-th call and answers the next one."""

    def __init__(self, client: Any, away_at: int) -> None:
        self.client, self.left = client, away_at

    def __getattr__(self, name: str) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MlflowException("API request failed")
        return getattr(self.client, name)


@pytest.mark.parametrize("away_at", [1, 3, 4, 6])
def test_one_run_is_made_whenever_the_server_goes_away(mlflow_config: RunConfig, away_at: int) -> None:
    client = make_client(tracking_uri(mlflow_config))
    run = TrackedRun(FlakyClient(client, away_at), mlflow_config, None)
    tracker = Tracker(run, mlflow_config.folder, retry_s=0.0)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0 / step})
        assert wait_for(lambda: not (tracker.writer.points or tracker.writer.in_flight), 120, 0.05)
    assert not tracker.finish("FINISHED")
    experiment = client.get_experiment_by_name(mlflow_config.tracking.experiment)
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (tracker.run_id, "FINISHED")
    assert run.data.params["model"] == "some/model"
    assert [(p.step, p.value) for p in client.get_metric_history(tracker.run_id, "loss")] == [(1, 1.0), (2, 0.5)]


def unreachable(config: RunConfig, **more: Any) -> RunConfig:
    tracking = config.tracking.model_copy(update={"uri": f"http://127.0.0.1:{free_port()}"})
    return config.model_copy(update={"tracking": tracking, **more})


def test_a_resumed_run_does_not_wait_for_the_server(
    mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker.start(unreachable(mlflow_config), "0" * 32)
    assert tracker.run_id == "0" * 32
    tracker.log(1, {"loss": 1.0})
    assert tracker.finish("FINISHED").spooled == 1
    assert "trying again during the training" in caplog.text


def test_a_run_that_has_its_pods_does_not_wait_for_the_server(
    mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker.start(unreachable(mlflow_config, cluster=ClusterConfig(provider="kuberay")))
    assert tracker.run_id is None
    tracker.finish("FINISHED")


def test_tags_name_the_origin_of_the_attempt(mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ATTEMPT": "2", "KFP_RUN": "kfp-7", "GIT_REVISION": "abc"}.items():
        monkeypatch.setenv(f"TIDEMILL_{name}", value)
    config = mlflow_config.model_copy(update={"cluster": ClusterConfig(provider="kuberay")})
    first = Tracker.start(config)
    first.finish("FAILED")
    monkeypatch.setenv("TIDEMILL_ATTEMPT", "3")
    second = Tracker.start(config, first.run_id)
    second.finish("FINISHED")
    tags = second.client.get_run(first.run_id).data.tags
    assert (tags["tidemill.attempt"], tags["tidemill.cluster"]) == ("3", "addition-a3")
    assert (tags["kfp.run_id"], tags["tidemill.git_revision"]) == ("kfp-7", "abc")
    assert tags["tidemill.image"] == config.kubernetes.image


def tags_of(tracker: Tracker) -> dict[str, str]:
    return dict(tracker.client.get_run(tracker.run_id).data.tags)


def status_of(tracker: Tracker) -> str:
    return str(tracker.client.get_run(tracker.run_id).info.status)


def test_a_failed_run_has_the_reason_until_it_resumes(mlflow_config: RunConfig) -> None:
    first = Tracker.start(mlflow_config)
    first.fail(RunError("engine 0 died: \x1b[31m" + "x" * 10_000))
    why = tags_of(first)["tidemill.failure"]
    assert status_of(first) == "FAILED" and why.startswith("RunError: engine 0 died: \ufffd[31mx") and len(why) < 1500
    second = Tracker.start(mlflow_config, first.run_id)
    second.finish("FINISHED")
    assert (status_of(second), "tidemill.failure" in tags_of(second)) == ("FINISHED", False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupted_run_did_not_fail(mlflow_config: RunConfig, error: BaseException) -> None:
    tracker = Tracker.start(mlflow_config)
    tracker.fail(error)
    assert (status_of(tracker), "tidemill.failure" in tags_of(tracker)) == ("KILLED", False)


def test_an_attempt_before_the_first_checkpoint_continues_the_same_run(mlflow_config: RunConfig) -> None:
    first = Tracker.start(mlflow_config)
    first.fail(RunError("no room"))
    second = Tracker.start(mlflow_config)
    second.finish("FINISHED")
    assert second.run_id == first.run_id
    other = Tracker.start(mlflow_config.model_copy(update={"seed": 7}))  # its parameters differ
    other.finish("FINISHED")
    assert other.run_id != first.run_id and other.client.get_run(other.run_id).data.params["seed"] == "7"


def test_description_and_source_say_where_the_rest_is(
    mlflow_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_GIT_REVISION", "abc")
    tracker = Tracker.start(mlflow_config)
    tracker.finish("FINISHED")
    tags = tags_of(tracker)
    assert (tags["mlflow.source.name"], tags["mlflow.source.git.commit"]) == ("tidemill", "abc")
    assert str(mlflow_config.folder) in tags["mlflow.note.content"]


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:////proc/none/mlflow.db"])
def test_an_invalid_address_is_refused(mlflow_config: RunConfig, uri: str) -> None:
    tracking = mlflow_config.tracking.model_copy(update={"uri": uri})
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        Tracker.start(mlflow_config.model_copy(update={"tracking": tracking}))


@pytest.mark.parametrize("name", ["a#b", "", "/a", "a/../b", "a//b", "x" * 251, "größe"])
def test_names_that_mlflow_refuses_are_refused_at_once(name: str, run_config: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(TrackedRun(None, run_config, "run", opened=True), tmp_path)
    with pytest.raises(ConfigError, match="metric name"):
        tracker.log(1, {"fine": 1.0, name: 1.0})
    assert not tracker.writer.points
    tracker.writer.close(10)


def test_skipped_prompts_of_a_score_are_reported_once(mlflow_config: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker.start(mlflow_config)
    with EventLog(tmp_path / "events.jsonl") as log:
        observer = RunObserver(mlflow_config, log, tracker)
        for step, skipped in enumerate([{}, {"too_long": 2, "kills_engine": 1}, {"too_long": 2, "kills_engine": 1}]):
            observer.evaluated(step, Evaluation(step, 0.5, (), skipped))
    tracker.finish("FINISHED")
    assert history(tracker, "evaluation/skipped/kills_engine") == [(1, 1.0), (2, 1.0)]
    [notice] = [event.text for event in read_events(tmp_path / "events.jsonl") if isinstance(event, Notice)]
    assert notice == "held-out prompts without an answer, which the score does not include: 1 kills_engine, 2 too_long"
