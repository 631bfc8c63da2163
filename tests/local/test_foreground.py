"""`tidemill train` with a stub of the training, and as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from tiny_model import make_tiny_model

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import RunError
from tidemill.local.foreground import train_in_foreground
from tidemill.observe.events import EvaluationFinished, EventLog, PhaseStarted, StepFinished, past_events
from tidemill.observe.report import Summary
from tidemill.steps.run_folder import output_lock

EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
TIMEOUT_S = 480
SCRIPT = """
import os, signal, subprocess, sys
from pathlib import Path
from tidemill.local.foreground import train_in_foreground
from tidemill.errors import TidemillError, RunError
from tidemill.observe.events import EventLog, StepFinished
from tidemill.observe.report import Summary
from tidemill.config.reading import load_config

def train(config):
    print("chatter")
    subprocess.run(["sh", "-c", "echo chatter of a worker >&2"])
    with EventLog(config.folder / "events.jsonl") as log:
        log.write(StepFinished(1, 2, 1, 1.0, {"reward/mean": 0.125}))
    if sys.argv[2] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("interrupted")
    if sys.argv[2] == "failed":
        raise RunError("an actor died")
    return Summary(1, 0.5, 0.75, 1.0, 1.0, 1.0, None, None, None, None, None, "s3://a/b", None, None)

try:
    code = train_in_foreground(load_config("run.yaml", [f"output={sys.argv[1]}"]), train, debug=False)
except TidemillError as error:
    print(error, file=sys.stderr)
    code = 1
sys.exit(code)
"""


def settings(folder: Path) -> dict[str, object]:
    """A real training of a tiny model that ends after two steps."""
    make_tiny_model(folder / "model", 0)
    rows = [json.dumps({"prompt": f"w{first} w{first + 1}", "answer": "7"}) for first in range(5, 25)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "held_out.jsonl").write_text("\n".join(rows[:2]))
    return {
        "name": "tiny",
        "model": str(folder / "model"),
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl", "max_prompt_tokens": 8},
        "rewards": [{"function": "exact_number"}],
        "rollout": {"group_size": 2, "max_new_tokens": 4, "dtype": "float32"},
        "trainer": {"steps": 2, "ppo_mini_batch_size": 2, "precision": "float32", "threads": 1},
    }


def trained(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(EXAMPLE.read_text())
    for name in ("addition_train.jsonl", "addition_held_out.jsonl"):
        (folder / name).write_text(EXAMPLE.with_name(name).read_text())
    command = [sys.executable, "-c", SCRIPT, "runs", end]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_training_shows_its_steps_and_writes_its_files(tmp_path: Path) -> None:
    done = trained(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    assert "   1/2      0.125" in done.stdout
    assert "Held-out score  0.500  ->  0.750" in done.stdout
    assert "chatter" not in done.stdout + done.stderr
    folder = tmp_path / "runs/addition"
    assert sorted((folder / "log.txt").read_text().splitlines()) == ["chatter", "chatter of a worker"]
    assert Summary.read(folder / "summary.json").held_out_after == 0.75
    assert load_config(folder / "config.yaml").name == "addition"


def test_training_that_continues_counts_the_time_of_its_attempts(tmp_path: Path) -> None:
    events = tmp_path / "runs/addition/events.jsonl"
    with EventLog(events) as log:
        log.write(PhaseStarted("train", 1000.0))
        log.write(StepFinished(1, 2, 1, 1.0, {"reward/mean": 0.1}, 1500.0))
    assert trained(tmp_path, "well").returncode == 0
    assert 500 < Summary.read(events.with_name("summary.json")).total_seconds < 1000


def test_training_without_enough_memory_does_not_start(addition: RunConfig) -> None:
    many = parse_config(addition.to_yaml(), ["rollout.engines=100000"])
    with pytest.raises(RunError, match=r"not enough memory: .* or lower one of: rollout\.engines = 100000, "):
        train_in_foreground(many, lambda config: pytest.fail("it began"), debug=False)
    assert not many.folder.exists()


def test_interrupted_training_says_how_to_resume(tmp_path: Path) -> None:
    done = trained(tmp_path, "interrupted")
    assert done.returncode == 130, done.stderr
    assert "train runs/addition/config.yaml` resumes from the newest checkpoint" in done.stdout
    assert "   1/2      0.125" in done.stdout


def test_failed_training_says_why_and_where_its_log_is(tmp_path: Path) -> None:
    done = trained(tmp_path, "failed")
    assert done.returncode == 1
    assert "log: runs/addition/log.txt" in done.stdout
    assert done.stderr == "an actor died\n"


def test_second_training_below_the_same_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with output_lock(tmp_path / "runs", "addition-1"):
        done = trained(tmp_path, "well")
    assert done.returncode == 1
    assert "addition-1" in done.stderr and "still uses" in done.stderr
    assert not (tmp_path / "runs/addition").exists()


def processes_in(folder: Path) -> list[int]:
    """Other processes whose working directory is below a folder."""
    found = psutil.process_iter(["pid", "cwd"])
    return [each.info["pid"] for each in found if each.info["cwd"] and each.info["cwd"].startswith(str(folder))]


@pytest.mark.slow
def test_real_training_is_watched_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    command = [sys.executable, "-m", "tidemill.cli.main", "train", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "   2/2 " in done.stdout and "score the held-out prompts after training" in done.stdout
    assert done.stderr == ""
    summary = Summary.read(tmp_path / "runs/tiny/summary.json")
    assert summary.steps == 2
    assert summary.held_out_after is not None
    assert all(sample.after is not None for sample in summary.samples)
    events = past_events(tmp_path / "runs/tiny/events.jsonl")
    assert [event.step for event in events if isinstance(event, EvaluationFinished)] == [0, 2]
    assert min(summary.phase_seconds[name] for name in ("load", "get_groups", "update_actor", "sync", "export")) > 0
    assert processes_in(tmp_path) == []
