import secrets
from pathlib import Path

import pytest

from tidemill.config.run import RunConfig
from tidemill.errors import ModelError
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.registry import gate, model_source, pinned_uri, promote, register
from tidemill.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def finished_run(config: RunConfig) -> str:
    tracker = Tracker.start(config)
    tracker.finish("FINISHED")
    return tracker.run_id


def test_a_registered_model_is_found_by_version_and_alias(mlflow_config: RunConfig) -> None:
    run_id, uri = finished_run(mlflow_config), tracking_uri(mlflow_config)
    tags = {"checkpoint_uri": "s3://b/runs/addition/checkpoints/00000004"}
    assert register(mlflow_config, "s3://b/one", run_id, 0.25, tags) == "1"
    assert register(mlflow_config, "s3://b/two", run_id, None, tags) == "2"
    assert model_source("models:/addition/1", uri) == "s3://b/one"
    assert model_source("models:/addition@candidate", uri) == "s3://b/two"
    assert pinned_uri("models:/addition@candidate", uri) == "models:/addition/2"
    version = make_client(uri).get_model_version("addition", "1")
    assert version.run_id == run_id
    assert version.tags["score"] == "0.25"
    assert version.tags["checkpoint_uri"] == tags["checkpoint_uri"]
    assert len(version.tags["config_digest"]) == 64


def test_registering_again_makes_no_second_version(mlflow_config: RunConfig) -> None:
    run_id = finished_run(mlflow_config)
    assert register(mlflow_config, "s3://b/one", run_id, 0.25, {}) == "1"
    assert register(mlflow_config, "s3://b/one", run_id, 0.25, {}) == "1"


def test_a_missing_version_lists_those_that_exist(mlflow_config: RunConfig) -> None:
    uri = tracking_uri(mlflow_config)
    with pytest.raises(ModelError, match="empty"):
        model_source("models:/addition/1", uri)
    register(mlflow_config, "s3://b/one", finished_run(mlflow_config), 1.0, {})
    for missing in ("models:/addition/7", "models:/addition@champion"):
        with pytest.raises(ModelError, match="versions of addition are 1"):
            model_source(missing, uri)
    with pytest.raises(ModelError, match="its models are addition"):
        model_source("models:/subtraction/1", uri)


@pytest.mark.parametrize("uri", ["models:/a", "models:/a/latest", "models:/a@1x", "s3://a/b", "models:/a/1/2"])
def test_other_forms_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="VERSION or models:/NAME@ALIAS"):
        model_source(uri, f"sqlite:///{tmp_path}/never.db")
    assert not (tmp_path / "never.db").exists()


@pytest.mark.parametrize(
    ("before", "after", "minimum", "passed", "reason"),
    [
        (0.1, 0.9, None, True, "0.9, before training 0.1"),
        (0.5, 0.5, None, True, "0.5"),
        (0.5, 0.4, None, False, "fell from 0.5 to 0.4"),
        (0.9, 0.8, 0.7, False, "fell from 0.9 to 0.8"),
        (0.1, 0.6, 0.7, False, "below registry.min_score = 0.7"),
        (None, 0.7, 0.7, True, "0.7"),
        (None, None, None, True, "no held-out score"),
        (None, None, 0.7, False, "to reach 0.7"),
        (0.1, float("nan"), None, False, "nan"),
    ],
)
def test_the_gate_compares_scores(
    before: float | None, after: float | None, minimum: float | None, passed: bool, reason: str
) -> None:
    decision = gate(before, after, minimum)
    assert decision[0] is passed
    assert reason in decision[1]


def registered(config: RunConfig, score: float | None) -> str:
    return register(config, f"s3://b/{secrets.token_hex(4)}", finished_run(config), score, {})


def champion(config: RunConfig) -> str:
    return pinned_uri("models:/addition@champion", tracking_uri(config))


def test_only_a_version_that_scores_no_less_becomes_the_champion(mlflow_config: RunConfig) -> None:
    for score, passes, now in ((0.5, True, "1"), (0.4, False, "1"), (0.5, True, "3"), (0.75, True, "4")):
        version = registered(mlflow_config, score)
        assert promote(mlflow_config, version, 0.1, score)[0] is passes
        assert champion(mlflow_config) == f"models:/addition/{now}"
        assert pinned_uri("models:/addition@candidate", tracking_uri(mlflow_config)) == f"models:/addition/{version}"


def test_promoting_the_champion_again_changes_nothing(mlflow_config: RunConfig) -> None:
    version = registered(mlflow_config, 0.5)
    for _ in range(2):
        assert promote(mlflow_config, version, 0.1, 0.5)[0]
    assert champion(mlflow_config) == "models:/addition/1"


def test_the_reason_against_promotion_names_both_scores(mlflow_config: RunConfig) -> None:
    promote(mlflow_config, registered(mlflow_config, 0.5), 0.1, 0.5)
    reason = promote(mlflow_config, registered(mlflow_config, 0.25), 0.1, 0.25)[1]
    assert reason == "it scores 0.25, and the champion, version 1, 0.5"


def test_scores_of_other_prompts_are_not_compared(mlflow_config: RunConfig) -> None:
    promote(mlflow_config, registered(mlflow_config, 0.5), 0.1, 0.5)
    data = mlflow_config.data.model_copy(update={"held_out": "easier.jsonl"})
    easier = mlflow_config.model_copy(update={"data": data})
    passed, reason = promote(easier, registered(easier, 0.9), 0.1, 0.9)
    assert not passed and "scored in another way" in reason
    assert champion(mlflow_config) == "models:/addition/1"


@pytest.mark.parametrize(("before", "passed"), [(0.8, True), (0.95, False), (None, False)])
def test_a_run_that_began_with_the_champion_is_compared_with_its_beginning(
    mlflow_config: RunConfig, before: float | None, passed: bool
) -> None:
    promote(mlflow_config, registered(mlflow_config, 0.5), 0.1, 0.5)
    data = mlflow_config.data.model_copy(update={"held_out": "new.jsonl"})
    goes_on = mlflow_config.model_copy(update={"data": data, "model": "models:/addition/1"})
    assert promote(goes_on, registered(goes_on, 0.9), before, 0.9)[0] is passed


def test_a_version_without_a_score_replaces_no_champion(mlflow_config: RunConfig) -> None:
    assert promote(mlflow_config, registered(mlflow_config, None), None, None)[0]
    assert not promote(mlflow_config, registered(mlflow_config, 0.5), None, 0.5)[0]
