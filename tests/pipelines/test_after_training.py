"""The steps after training, with a real store, registry and engine, on a summary made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from tidemill.config import RunConfig
from tidemill.observe.events import read_events
from tidemill.observe.report import Sample, Summary
from tidemill.run_file import load_config
from tidemill.steps import evaluate, provision, register, teardown
from tidemill.store.locate import Locator
from tidemill.store.server import open_store, store_folder
from tidemill.store.tracking import Tracker, make_client, tracking_uri
from tidemill.store.weed import find_server

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
ANSWER = {"prompt": "w5 w6", "response": "w7", "expected": "7", "reward": 1.0}


@pytest.fixture
def trained(tmp_path: Path) -> RunConfig:
    """A run of a tiny model, with two held-out prompts."""
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


def evaluation(score: float) -> str:
    return json.dumps({"version": 0, "score": score, "answers": [ANSWER], "skipped": {}})


def test_better_model_becomes_a_version_and_the_report_says_so(trained: RunConfig, tmp_path: Path) -> None:
    report, before = tmp_path / "report.md", summary(trained, 0.25)
    final = Summary.from_json(register(trained.to_yaml(), before.to_json(), evaluation(0.75), str(report)))
    assert (final.held_out_after, final.model_version) == (0.75, "addition/1")
    assert final.samples[0].after == "w7"
    assert final.total_seconds >= final.phase_seconds["register"] >= 0
    assert Summary.read(trained.folder / "summary.json") == final
    assert "0.250" in report.read_text() and "addition/1" in report.read_text()


def test_mlflow_run_gets_the_final_score_the_answers_and_the_report(trained: RunConfig, tmp_path: Path) -> None:
    before = summary(trained, 0.25)
    register(trained.to_yaml(), before.to_json(), evaluation(0.75), str(tmp_path / "report.md"))
    client, run_id = make_client(tracking_uri(trained)), before.mlflow_run_id
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "evaluation/score")] == [(25, 0.75)]
    folder = Path(client.download_artifacts(run_id, "", str(tmp_path)))
    assert (folder / "report.md").read_text() == (tmp_path / "report.md").read_text()
    table = json.loads((folder / "answers/000025.json").read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == ANSWER


def test_repeated_registration_makes_no_second_version(trained: RunConfig, tmp_path: Path) -> None:
    before, report = summary(trained, 0.25), str(tmp_path / "report.md")
    versions = [register(trained.to_yaml(), before.to_json(), evaluation(0.75), report) for _ in range(2)]
    assert {Summary.from_json(text).model_version for text in versions} == {"addition/1"}


def test_worse_model_is_not_registered_and_the_reason_is_told(trained: RunConfig, tmp_path: Path) -> None:
    text = register(trained.to_yaml(), summary(trained, 0.75).to_json(), evaluation(0.25), str(tmp_path / "report.md"))
    final = Summary.from_json(text)
    assert final.model_version is None
    assert "fell from 0.75 to 0.25" in final.reason("model_version")
    last = read_events(trained.folder / "events.jsonl")[-1]
    assert (last.kind, "fell from" in str(last)) == ("warning", True)


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
        brought = Locator.of(trained).bring("s3://tidemill/runs/addition/model/25", tmp_path / "brought")
        assert (brought.path / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    finally:
        teardown(text)
    assert [answer["prompt"] for answer in result["answers"]] == ["w5 w6", "w8"]
    assert scores == {"held_out_score": result["score"]}
    [scored] = [event for event in read_events(trained.folder / "events.jsonl") if event.kind == "evaluation_finished"]
    assert (scored.step, scored.score) == (25, result["score"])
    assert find_server(store_folder(trained.output)) is None


def test_run_without_held_out_prompts_is_registered_without_a_score(trained: RunConfig, tmp_path: Path) -> None:
    run = trained.model_copy(
        update={
            "data": trained.data.model_copy(update={"held_out": None}),
            "evaluation": trained.evaluation.model_copy(update={"every": 0}),
        }
    )
    text, trained_summary = run.to_yaml(), summary(run, None).to_json()
    scored = evaluate(text, trained_summary, {}.__setitem__)
    assert scored == "null"
    assert Summary.from_json(register(text, trained_summary, scored, str(tmp_path / "r.md"))).model_version
