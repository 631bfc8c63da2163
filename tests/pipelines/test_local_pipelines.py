"""Whole pipelines through the KFP local runner, with stubs for training and scoring; see `pipeline_rig`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pipeline_rig import Rig

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.observe.report import Summary
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.registry import champion_version, last_prompts, model_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.steps,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def rig(tmp_path: Path, empty_mlflow: Path) -> Rig:
    return Rig.make(tmp_path, empty_mlflow)


def settings(rig: Rig) -> RunConfig:
    return load_config(rig.folder / "run.yaml")


def test_run_of_the_form_retries_registers_reports_and_links(rig: Rig) -> None:
    done = rig.run("post_training", run_name="tiny-9", overrides="trainer.learning_rate=0.0008\n# a remark\nseed=7")
    assert done.returncode == 0, done.stdout
    assert rig.tries("tiny-9") == 2
    final = Summary.from_json(rig.output("register", "Output"))
    assert (final.held_out_after, final.model_version) == (0.8, "tiny/1")
    page = rig.output("register", "page")
    assert "<svg" in page and "0.250 &rarr; 0.800" in page and "tiny-9" in page
    assert json.loads(rig.output("register", "model"))["uri"] == final.model_uri
    assert "# Run tiny-9" in rig.output("validate", "links")
    assert not rig.store_is_up


def test_killed_step_is_retried_and_the_form_may_have_one_line_and_no_name(rig: Rig) -> None:
    done = rig.run("post_training", overrides="[seed=9, trainer.learning_rate=0.0007]")
    assert done.returncode == 0, done.stdout
    [name] = [path.name for path in (rig.folder / "runs").iterdir() if path.name.startswith("tiny")]
    assert re.fullmatch(r"tiny-\d{1,8}", name)  # after the KFP run
    assert rig.tries(name) == 2
    final = Summary.from_json(rig.output("register", "Output"))
    assert (final.held_out_after, final.model_version) == (0.7, "tiny/1")
    assert not rig.store_is_up


def test_failure_ends_the_run_and_teardown_runs_after_it(rig: Rig) -> None:
    done = rig.run("post_training", run_name="tiny-13", overrides="seed=13")
    assert done.returncode != 0
    assert "the reward is broken" in done.stdout
    assert "Task \x1b[96m'teardown'\x1b[0m finished with status \x1b[92mSUCCESS" in done.stdout
    assert rig.tries("tiny-13") == 1  # KFP makes three more, which end at once
    assert not rig.store_is_up


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, empty_mlflow: Path) -> Rig:
    """A finished sweep of two variants; the training of the second failed once."""
    rig = Rig.make(tmp_path_factory.mktemp("sweep"), empty_mlflow)
    lines = "trainer.learning_rate=0.0003\ntrainer.learning_rate=0.0009 seed=7"
    done = rig.run("sweep", run_name="rates", variants=lines)
    assert done.returncode == 0, done.stdout
    return rig


def test_sweep_trains_every_variant_and_registers_the_best_one(swept: Rig) -> None:
    assert (swept.tries("rates-v1"), swept.tries("rates-v2")) == (1, 2)
    assert Summary.from_json(swept.output("select-best", "Output")).model_version == "tiny/1"
    rows = [line for line in swept.output("select-best", "report").splitlines() if line.startswith("| rates")]
    assert [row.split()[1] for row in rows] == ["rates-v2", "rates-v1"]
    version = model_version("models:/tiny/1", tracking_uri(settings(swept)))
    assert version.source == "s3://tidemill/runs/rates-v2/model/3"
    assert not swept.store_is_up


def test_variants_are_children_of_their_sweep_in_mlflow(swept: Rig) -> None:
    client = make_client(tracking_uri(settings(swept)))
    experiment = client.get_experiment_by_name("tidemill").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {"rates", "rates-v1", "rates-v2"}
    sweep = runs.pop("rates")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {sweep.info.run_id}
    assert sweep.data.tags["tidemill.best"] == "rates-v2"
    assert sweep.data.metrics == {"held_out_score/rates-v1": 0.3, "held_out_score/rates-v2": 0.9}
    assert sweep.info.status == "FINISHED"


def test_failed_variant_fails_the_sweep_and_teardown_runs_after_it(rig: Rig) -> None:
    done = rig.run("sweep", run_name="s", variants="seed=13\nseed=1")
    assert done.returncode != 0
    assert "the reward is broken" in done.stdout
    assert not rig.store_is_up
    assert champion_version(settings(rig)) is None


def test_bad_variant_is_refused_before_any_is_trained(rig: Rig) -> None:
    done = rig.run("sweep", run_name="s", variants="seed=1\ntrainer.stepz=3")
    assert done.returncode != 0
    assert "trainer.stepz = 3. Allowed: one of the keys" in done.stdout
    assert rig.tries("s-v1") == 0


def fill(rig: Rig, *names: str) -> None:
    """Put files of prompts into the folder `prompts`."""
    (rig.folder / "prompts").mkdir(exist_ok=True)
    for name in names:
        (rig.folder / f"prompts/{name}.jsonl").write_text('{"prompt": "w5 w6", "answer": "7"}\n')


@pytest.fixture(scope="module")
def continual(tmp_path_factory: pytest.TempPathFactory, empty_mlflow: Path) -> Rig:
    """Continual training after its first run, from the model of the settings; tests leave no new prompts behind."""
    rig = Rig.make(tmp_path_factory.mktemp("continual"), empty_mlflow)
    fill(rig, "2026-11-01")
    first = rig.run("continual", run_name="c1", prompts="prompts")
    assert first.returncode == 0, first.stdout
    assert (champion_version(settings(rig)), last_prompts(settings(rig))) == ("1", "2026-11-01.jsonl")
    return rig


def test_continual_training_without_new_prompts_leaves_the_champion(continual: Rig) -> None:
    idle = continual.run("continual", run_name="c2", prompts="prompts")
    assert idle.returncode == 0, idle.stdout
    assert (continual.output("prepare-continual", "Output"), continual.tries("c2")) == ("wait", 0)
    assert "Nothing new" in continual.output("prepare-continual", "links")
    assert champion_version(settings(continual)) == "1"


def test_continual_training_trains_the_champion_on_all_new_prompts(continual: Rig) -> None:
    fill(continual, "2026-11-02", "2026-11-03")
    second = continual.run("continual", run_name="c3", prompts="prompts", overrides="trainer.learning_rate=0.0006")
    assert second.returncode == 0, second.stdout
    resolved = continual.output("prepare-continual", "settings")
    assert "model: models:/tiny/1\n" in resolved
    [source] = re.findall(r"train: (.+/inputs/.+)", resolved)
    assert Path(source).read_text().count("\n") == 2 and source.endswith("2026-11-03.jsonl")
    assert (champion_version(settings(continual)), last_prompts(settings(continual))) == ("2", "2026-11-03.jsonl")


def test_continual_training_without_progress_leaves_the_champion(continual: Rig) -> None:
    champion = champion_version(settings(continual))
    fill(continual, "2026-11-04")
    worse = continual.run("continual", run_name="c4", prompts="prompts", overrides="trainer.learning_rate=0.0001")
    assert worse.returncode == 0, worse.stdout
    assert champion_version(settings(continual)) == champion
    assert last_prompts(settings(continual)) == "2026-11-04.jsonl"
