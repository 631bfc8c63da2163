"""The steps provision, train and evaluate, with a real store and engine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tiny_model import make_tiny_model
from trained_rig import registered, summary

from tidemill.config.run import RunConfig
from tidemill.driver.run import samples
from tidemill.models.locate import Locator
from tidemill.observe.events import read_events
from tidemill.observe.report import Sample
from tidemill.observe.text import LONGEST
from tidemill.observe.text import excerpt as cut
from tidemill.protocols import Answer, Evaluation
from tidemill.steps.provider import LocalProvider
from tidemill.steps.training import evaluate, excerpt, log_number, provision
from tidemill.store.seaweedfs import find_server
from tidemill.store.server import open_store, store_folder

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
ARGUMENT_BYTES = 128 * 1024  # of one argument on Linux; KFP hands all inputs of a step over as one


def test_inputs_of_a_step_fit_into_one_argument(trained: RunConfig, tmp_path: Path) -> None:
    texts = [f"{n} {'何' * 100_000} {n}" for n in range(100)]
    answers = tuple(Answer(text, text, text, 1.0) for text in texts)
    evaluated = Evaluation(0, 0.5, answers, {})
    passed = replace(summary(trained, 0.25), samples=samples(evaluated))
    kept = excerpt(evaluated, passed)
    assert [answer.prompt for answer in kept.answers] == [sample.prompt for sample in passed.samples]
    inputs = {"config": trained.to_yaml(), "summary": passed.to_json(), "evaluation": json.dumps(asdict(kept))}
    assert len(json.dumps({"parameterValues": inputs})) < ARGUMENT_BYTES
    final, _ = registered(trained, passed, json.dumps(asdict(kept)), tmp_path)
    assert [sample.after for sample in final.samples] == [answer.response for answer in kept.answers]


def test_prompts_that_are_cut_to_the_same_text_count_once(trained: RunConfig) -> None:
    answers = tuple(Answer(f"{'a' * LONGEST}{n:03}{'b' * LONGEST}", str(n), None, 1.0) for n in range(100))
    asked = replace(summary(trained, 0.25), samples=(Sample(cut(answers[0].prompt), "before", None, None),))
    assert [answer.response for answer in excerpt(Evaluation(0, 0.5, answers, {}), asked).answers] == ["0"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "text"])
def test_only_finite_numbers_are_metrics_of_kfp(value: object) -> None:
    metrics: dict[str, float] = {}
    log_number(metrics.__setitem__, "score", value)
    log_number(metrics.__setitem__, "steps", 3)
    assert metrics == {"steps": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_exported_model_is_scored_from_the_store_by_an_engine_of_its_own(trained: RunConfig, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    text, scores = trained.to_yaml(), {}
    provisioned = json.loads(provision(text))
    try:
        assert provisioned["model"] == str(tmp_path / "model")
        with open_store(trained.store, trained.output) as store:
            store.upload_folder(tmp_path / "model", "runs/addition/model/25")
        result = json.loads(evaluate(text, summary(trained, 0.0).to_json(), scores.__setitem__))
        brought = Locator.of(trained).fetch_model("s3://tidemill/runs/addition/model/25", tmp_path / "brought")
        assert (brought.path / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    finally:
        LocalProvider(trained).teardown()
    assert [answer["prompt"] for answer in result["answers"]] == ["w5 w6"]  # what the report shows
    assert scores == {"held_out_score": result["score"]}
    events = read_events(trained.folder / "events.jsonl")
    assert [event.name for event in events if event.kind == "phase_started"] == [
        "provision",
        "start the S3 server",
        f"find {tmp_path / 'model'}; the first run on a machine downloads or converts it",
        "evaluate",
        "load the exported model into a new engine and score it",
    ]
    [scored] = [event for event in events if event.kind == "evaluation_finished"]
    assert (scored.step, scored.score) == (25, result["score"])
    assert [answer["prompt"] for answer in scored.answers] == ["w5 w6", "w8"]
    assert find_server(store_folder(trained.output)) is None


def test_run_without_held_out_prompts_is_registered_without_a_score(trained: RunConfig, tmp_path: Path) -> None:
    run = trained.model_copy(
        update={
            "data": trained.data.model_copy(update={"held_out": None}),
            "evaluation": trained.evaluation.model_copy(update={"every": 0}),
        }
    )
    trained_summary = summary(run, None)
    scored = evaluate(run.to_yaml(), trained_summary.to_json(), {}.__setitem__)
    assert scored == "null"
    assert registered(run, trained_summary, scored, tmp_path)[0].model_version
