"""A whole run of a tiny model, everything real and two trainer ranks, killed in the middle of training and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import yaml
from tiny_model import make_tiny_model

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.observe.events import EvaluationFinished, Notice, StepFinished, read_events
from tidemill.observe.report import Summary
from tidemill.store.checkpoint import open_checkpoints
from tidemill.tracking.mlflow_server import make_client, tracking_uri

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.filterwarnings("default")]
STEPS, BATCH, EVERY = 30, 4, 2
TIMEOUT_S = 1500
REWARD = """
def even(response, *, prompt, answer, extra):
    if prompt == "w90 w91":
        raise ValueError("no opinion")
    words = response.split()
    return sum(int(word[1:]) % 2 == 0 for word in words if word[1:].isdigit()) / max(1, len(words))
"""


@dataclass(frozen=True)
class Resumed:
    """The results of a run that was killed once, resumed, and finished."""

    config: RunConfig
    output: str
    killed_after: int
    left_over: list[str]
    summary: Summary

    @property
    def steps(self) -> list[StepFinished]:
        return [e for e in read_events(self.config.folder / "events.jsonl") if isinstance(e, StepFinished)]


def settings(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Prompts of two words, one for which the reward fails and one that is too long; the reward counts even words."""
    rows = [json.dumps({"prompt": f"w{first} w{first + 1}"}) for first in range(5, 37)]
    bad = [json.dumps({"prompt": "w90 w91"}), json.dumps({"prompt": "w3 " * 17})]
    (folder / "train.jsonl").write_text("\n".join([*rows, *bad]))
    (folder / "held_out.jsonl").write_text("\n".join(rows[:4]))
    (folder / "rewards_of_test.py").write_text(REWARD)
    return {
        "name": "tiny",
        "model": str(make_tiny_model(folder / "model", seed=0)),
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl", "max_prompt_tokens": 16},
        "rewards": [{"function": "rewards_of_test:even"}],
        "rollout": {"group_size": 4, "max_new_tokens": 8, "dtype": "float32", "threads": 1},
        "trainer": {
            "steps": steps,
            "ranks": 2,
            "ppo_mini_batch_size": BATCH,
            "learning_rate": 0.03,  # so that what is learned is many times the noise of a step
            "precision": "float32",
            "threads": 1,
        },
        "evaluation": {"every": 10},
        "checkpoint": {"every": EVERY},
    }


def tidemill(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidemill.cli.main", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: subprocess.Popen[str], events: Path, step: int) -> int:
    """Wait until a run has finished a step; returns the newest finished step."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done = [event.step for event in read_events(events) if isinstance(event, StepFinished)]
        if done and done[-1] >= step:
            break
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    return done[-1]


def kill_in_training(process: subprocess.Popen[str], events: Path, step: int) -> int:
    """Kill every process of a run at once, as a machine failure does; returns the number of steps in the events."""
    wait_for_step(process, events, step)
    root = psutil.Process(process.pid)
    family = [root, *root.children(recursive=True)]
    for act in (psutil.Process.suspend, psutil.Process.kill):  # so that none of them can act on the death of another
        for member in family:
            with suppress(psutil.NoSuchProcess):
                act(member)
    psutil.wait_procs(family, timeout=120)
    process.communicate(timeout=120)
    return sum(isinstance(event, StepFinished) for event in read_events(events))


def kill_engine(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Kill only the process of the engine; returns its child processes."""
    family = psutil.Process(process.pid).children(recursive=True)
    [engine] = [member for member in family if "ray::EngineActor" in " ".join(words_of(member))]
    below = engine.children(recursive=True)
    engine.kill()
    return below


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes with a folder in their arguments."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings(folder)))
    with tidemill(folder, "run", "tiny.yaml") as first:
        killed_after = kill_in_training(first, folder / "runs/tiny-1/events.jsonl", 2 * EVERY + 1)
    with tidemill(folder, "run", "--resume", "tiny-1") as second:
        output = second.communicate(timeout=TIMEOUT_S)[0]
    assert second.returncode == 0, output
    config = load_config(folder / "runs/tiny-1/config.yaml")
    return Resumed(config, output, killed_after, processes_in(folder), Summary.read(config.folder / "summary.json"))


def test_run_resumes_at_the_step_after_a_checkpoint(resumed: Resumed) -> None:
    numbers = [event.step for event in resumed.steps]
    first, second = numbers[: resumed.killed_after], numbers[resumed.killed_after :]
    assert first == list(range(1, len(first) + 1))
    assert len(first) > 2 * EVERY
    assert second == list(range(second[0], STEPS + 1))
    assert EVERY < second[0] <= len(first) + 1
    assert second[0] % EVERY == 1


def test_every_prompt_is_trained_exactly_once(resumed: Resumed, tmp_path: Path) -> None:
    with open_checkpoints(resumed.config) as checkpoints:
        state = checkpoints.load(STEPS, tmp_path)
    ledger = state["ledger"]
    assert ledger["trained"] == STEPS * BATCH == state["position"]["groups"]
    assert ledger["cursor"] == ledger["trained"] + len(ledger["outstanding"]) + len(ledger["quarantined"])
    assert ledger["dropped"]["restart"] > 0


def test_prompts_that_cannot_be_trained_are_skipped_and_reported(resumed: Resumed) -> None:
    assert resumed.summary.skipped.keys() == {"too_long", "reward_error"}
    for reason, number in resumed.summary.skipped.items():
        assert f"skipped prompts: {number} ({reason})" in resumed.output
    log = (resumed.config.folder / "log.txt").read_text(errors="replace")
    assert "ValueError: no opinion" in log


def test_policy_learns_within_the_staleness_bound(resumed: Resumed) -> None:
    rewards = [event.metrics["reward/mean"] for event in resumed.steps]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1
    assert resumed.summary.max_age is not None
    assert resumed.summary.max_age <= resumed.config.asynchrony.max_staleness
    gaps = [event.metrics["sync/canary_gap"] for event in resumed.steps if "sync/canary_gap" in event.metrics]
    assert 0 <= max(gaps) < 1e-3  # how many there are depends on the machine: engines may skip versions


def test_summary_holds_every_fact_of_the_run(resumed: Resumed) -> None:
    summary = resumed.summary
    assert summary.steps == STEPS
    assert summary.model_version == "tiny/1"
    assert None not in (summary.held_out_before, summary.held_out_after, summary.mlflow_run_id)
    assert summary.checkpoint_uri == f"s3://tidemill/runs/tiny-1/checkpoints/{STEPS:08d}"
    assert summary.total_seconds > summary.train_seconds > 0
    assert summary.total_seconds > sum(event.seconds for event in resumed.steps)  # also of the one that was killed
    assert summary.peak_memory_bytes is not None and summary.peak_memory_bytes > 2**28


def test_mlflow_holds_one_run_with_scores_and_answers(resumed: Resumed) -> None:
    client = make_client(tracking_uri(resumed.config))
    experiment = client.get_experiment_by_name(resumed.config.tracking.experiment)
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (resumed.summary.mlflow_run_id, "FINISHED")
    scored = {point.step for point in client.get_metric_history(run.info.run_id, "evaluation/score")}
    assert client.get_metric_history(run.info.run_id, "sync/canary_gap")[0].step == 0  # before the first step
    first = {event.step: event.metrics["reward/mean"] for event in reversed(resumed.steps)}  # of a repeated step
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert len({point.step for point in history}) == len(history)
    second = {event.step for event in resumed.steps[resumed.killed_after :]}
    # A kill loses what the first attempt had not sent yet, at most a second of steps.
    assert second <= {point.step for point in history} <= set(first)
    later = {event.step: event.metrics["reward/mean"] for event in resumed.steps}  # if the kill came before it was sent
    assert all(point.value in (first[point.step], later[point.step]) for point in history)
    assert scored >= {0, 10, 20, STEPS}
    tables = {Path(file.path).stem for file in client.list_artifacts(run.info.run_id, "answers")}
    assert tables >= {"000000", "000010", "000020", f"{STEPS:06d}"}


def test_exported_model_loads_in_transformers_as_it_is(resumed: Resumed) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resumed.config.folder / "model"
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()) > 10_000
    assert AutoTokenizer.from_pretrained(folder).decode([7]) == "w7"


def test_screen_shows_steps_scores_and_what_to_do_next(resumed: Resumed) -> None:
    events = read_events(resumed.config.folder / "events.jsonl")
    last = [event.score for event in events if isinstance(event, EvaluationFinished)][-1]
    for part in (f"{STEPS}/{STEPS}", f"->  {last:.3f}", "tiny/1", "generate models:/tiny/1", " ui"):
        assert part in resumed.output


def test_no_process_is_left(resumed: Resumed) -> None:
    assert resumed.left_over == []


def test_run_outlives_its_engine(tmp_path: Path) -> None:
    count = 12
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings(tmp_path, count)))
    with tidemill(tmp_path, "train", "tiny.yaml") as run:
        [events] = [tmp_path / "runs/tiny/events.jsonl"]
        killed_at = wait_for_step(run, events, 4)
        below = kill_engine(run)
        _, left = psutil.wait_procs(below, timeout=120)  # it must not keep a GPU from the next one
        output = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode == 0, output
    assert left == []
    steps = [event for event in read_events(events) if isinstance(event, StepFinished)]
    assert [event.step for event in steps] == list(range(1, count + 1))
    ledger = {name: value for name, value in steps[-1].metrics.items() if name.startswith("ledger/")}
    assert ledger["ledger/trained"] == count * BATCH
    dropped = sum(value for name, value in ledger.items() if name.startswith("ledger/dropped/"))  # 0 if it was idle
    held = sum(ledger[f"ledger/{place}"] for place in ("trained", "quarantined", "dispatched", "queued"))
    assert ledger["ledger/issued"] == held + dropped
    assert sum(event.metrics.get("rollout/engines_joined", 0) for event in steps if event.step > killed_at) == 1
    notices = [event.text for event in read_events(events) if isinstance(event, Notice)]
    assert any(text.startswith("engine 0 is lost and will be replaced") for text in notices)
    assert any(text.startswith("engine 1 has joined with the newest version") for text in notices)
