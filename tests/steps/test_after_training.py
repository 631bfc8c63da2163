"""The steps after training, with a real store, registry and engine, on a summary made by hand."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.driver.run import samples
from tidemill.errors import StoreError
from tidemill.models.locate import Locator
from tidemill.observe.events import Notice, read_events
from tidemill.observe.report import Sample, Summary
from tidemill.observe.text import LONGEST
from tidemill.observe.text import excerpt as cut
from tidemill.protocols import Answer, Evaluation, evaluation_from_json
from tidemill.steps import steps
from tidemill.steps.request import Request
from tidemill.steps.steps import evaluate, excerpt, log_number, provision, register, teardown, track_evaluation
from tidemill.steps.sweep import finish_variant, select_best
from tidemill.store.seaweedfs import find_server
from tidemill.store.server import open_store, store_folder
from tidemill.tracking.mlflow_runs import metric_history, open_sweep
from tidemill.tracking.mlflow_server import await_server, make_client, tracking_uri
from tidemill.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
ARGUMENT_BYTES = 128 * 1024  # of one argument on Linux; KFP hands all inputs of a step over as one
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
    """KFP's artifact of the model."""

    def __init__(self, path: Path) -> None:
        self.path, self.metadata = str(path), {}


def registered(run: RunConfig, trained: Summary, evaluated: str, folder: Path) -> tuple[Summary, Model]:
    """What `register` returns, with its files in a folder: report.md, report.html, model.json."""
    model = Model(folder / "model.json")
    files = (str(folder / "report.md"), str(folder / "report.html"))
    return Summary.from_json(register(run.to_yaml(), trained.to_json(), evaluated, *files, model)), model


def evaluation(score: float) -> str:
    return json.dumps({"version": 0, "score": score, "answers": [ANSWER], "skipped": {}})


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
    [line] = re.findall(r'points="(.*?)"', (tmp_path / "report.html").read_text())
    assert len(line.split()) == 2


def test_curve_of_a_server_that_is_away_is_empty(trained: RunConfig) -> None:
    away = trained.model_copy(update={"tracking": trained.tracking.model_copy(update={"uri": "http://127.0.0.1:1"})})
    assert metric_history(away, "run", "reward/mean") == []


def test_what_steps_pass_on_is_one_argument_of_a_command(trained: RunConfig, tmp_path: Path) -> None:
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
def test_what_is_no_number_is_no_metric_of_kfp(value: object) -> None:
    metrics: dict[str, float] = {}
    log_number(metrics.__setitem__, "score", value)
    log_number(metrics.__setitem__, "steps", 3)
    assert metrics == {"steps": 3}


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


def test_model_without_an_mlflow_run_is_not_registered_and_the_reason_stands_in_one_pair_of_brackets(
    trained: RunConfig, tmp_path: Path
) -> None:
    final, _ = registered(trained, replace(summary(trained, 0.25), mlflow_run_id=None), evaluation(0.75), tmp_path)
    assert final.reason("model_version") == "(not tracked)"


def away(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The run with a server that nobody finds, which is waited for no longer than one look."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(steps, "await_server", partial(await_server, limit_s=0.0))
    return run.model_copy(update={"tracking": run.tracking.model_copy(update={"uri": "http://127.0.0.1:1"})})


def test_registration_waits_for_a_server_that_is_away(
    trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = summary(trained, 0.25)
    with pytest.raises(StoreError, match="does not answer within 0 s"):
        registered(away(trained, monkeypatch), before, evaluation(0.75), tmp_path)


def test_what_the_gate_refuses_needs_no_server(
    trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untracked = replace(summary(trained, 0.75), mlflow_run_id=None)
    final, _ = registered(away(trained, monkeypatch), untracked, evaluation(0.75), tmp_path)
    assert final.model_version is None


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
        teardown(text)
    assert [answer["prompt"] for answer in result["answers"]] == ["w5 w6"]  # what the report shows
    assert scores == {"held_out_score": result["score"]}
    [scored] = [event for event in read_events(trained.folder / "events.jsonl") if event.kind == "evaluation_finished"]
    assert (scored.step, scored.score) == (25, result["score"])
    assert [answer["prompt"] for answer in scored.answers] == ["w5 w6", "w8"]
    assert find_server(store_folder(trained.output)) is None


def concluded(run: RunConfig, name: str, score: float | None) -> str:
    """What `finish_variant` returns for a variant of a sweep."""
    variant = run.model_copy(update={"name": name, "registry": run.registry.model_copy(update={"model": "addition"})})
    before = summary(variant, 0.25, f"s3://tidemill/runs/{name}/model/25")
    return finish_variant(
        variant.to_yaml(), before.to_json(), "null" if score is None else evaluation(score), {}.__setitem__
    )


@pytest.mark.parametrize(
    ("scores", "best"), [((0.5, 0.75, None), "s-v2"), ((0.75, 0.75, 0.5), "s-v1"), ((None, float("nan"), 0.5), "s-v3")]
)
def test_best_variant_is_registered_from_what_the_store_has_of_it(
    trained: RunConfig, tmp_path: Path, scores: tuple[float | None, ...], best: str
) -> None:
    sweep = Request(trained.to_yaml(), run_name="s")
    open_sweep(sweep.settings(), ["s-v1", "s-v2", "s-v3"])
    results = [concluded(trained, f"s-v{n}", score) for n, score in enumerate(scores, start=1)]
    assert max(len(result) for result in results) < 200
    model = Model(tmp_path / "model.json")
    final = Summary.from_json(select_best(sweep, results, str(tmp_path / "r.md"), str(tmp_path / "r.html"), model))
    assert (final.model_uri, final.model_version) == (f"s3://tidemill/runs/{best}/model/25", "addition/1")
    assert f"| {best} (best) |" in (tmp_path / "r.md").read_text()
    runs = {run.info.run_name: run for run in make_client(tracking_uri(trained)).search_runs(["1"])}
    assert runs["s"].data.tags["tidemill.best"] == best
    assert len(runs["s"].data.metrics) == sum(score is not None for score in scores)
    assert {runs[f"s-v{n}"].data.tags["mlflow.parentRunId"] for n in (1, 2, 3)} == {runs["s"].info.run_id}


def test_sweep_without_any_score_registers_nothing_and_says_why(trained: RunConfig, tmp_path: Path) -> None:
    strict = trained.model_copy(update={"registry": trained.registry.model_copy(update={"min_score": 0.5})})
    results = [concluded(strict, f"s-v{n}", None) for n in (1, 2)]
    files = (str(tmp_path / "r.md"), str(tmp_path / "r.html"))
    final = select_best(Request(strict.to_yaml(), run_name="s"), results, *files, Model(tmp_path / "model.json"))
    assert Summary.from_json(final).model_version is None
    assert "no held-out score" in Summary.from_json(final).reason("model_version")


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
