"""`tidemill run` as a user runs it: in a process of its own."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from rich.console import Console

from tidemill.cli.main import main
from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.driver.resume import identity
from tidemill.errors import ConfigError, ModelError, RunError
from tidemill.local.launch import resume_run, start_run
from tidemill.steps.run_folder import existing_run, output_lock, prepare_folder
from tidemill.store.checkpoint import open_checkpoints
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.tracker import Tracker

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/addition.yaml"
TIMEOUT_S = 300
SLOW_REWARD = """
import time
open("imported", "w").close()
time.sleep(600)
"""


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=200)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.cli.main", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes that have a folder as working directory or in their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) or process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@contextmanager
def blocked_run(folder: Path, *arguments: str, screen: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A run whose validation hangs, because the module of its reward sleeps; yields once it sleeps."""
    (folder / "slow.py").write_text(SLOW_REWARD)
    words = command("run", *(arguments or (str(EXAMPLE), "rewards.0.function=slow:reward")))
    # A launcher that is killed cannot remove what it made.
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
        subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | {"TMPDIR": temporary},
            stdout=screen,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (folder / "imported").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_settings_that_its_checkpoints_do_not_fit_leave_an_earlier_run_as_it_was(
    addition: RunConfig, tmp_path: Path
) -> None:
    settings = prepare_folder(addition)
    before = settings.read_text()
    (addition.folder / "summary.json").write_text("{}")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.safetensors").touch()
    with open_checkpoints(addition) as checkpoints:
        checkpoints.commit(1, tmp_path / "parts", {"identity": identity(addition)})
    other = existing_run("addition", addition.output, ["asynchrony.max_staleness=2"])
    with pytest.raises(
        ConfigError, match=r"^asynchrony\.max_staleness = 2. Allowed: 1, the value at the start of addition"
    ):
        resume_run(other, Console(file=io.StringIO()))
    assert settings.read_text() == before
    assert (addition.folder / "summary.json").exists()


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_model_that_no_alias_names_is_refused_before_there_is_a_run(
    addition: RunConfig, screen: Console, empty_mlflow: Path
) -> None:
    addition.output.mkdir()
    shutil.copy(empty_mlflow, addition.output / "mlflow.db")
    with pytest.raises(ModelError, match="is not in the registry"):
        start_run(addition.model_copy(update={"model": "models:/gone@champion"}), screen)
    assert not (addition.output / "addition-1").exists()


def test_start_that_the_lock_refuses_makes_no_folder(addition: RunConfig, screen: Console) -> None:
    with output_lock(addition.output, "addition-1"), pytest.raises(RunError, match="still uses"):
        start_run(addition, screen)
    assert [path.name for path in addition.output.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("command", ["run", "check", "train"])
def test_temporary_folder_too_long_for_sockets_of_ray_is_refused_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main([command, str(EXAMPLE)]) == 2
    assert f"TMPDIR = '{tmp_path}'. Allowed: a path of at most 21 bytes" in capsys.readouterr().err
    assert not (tmp_path / "runs/addition-1").exists()


@pytest.mark.slow
@pytest.mark.steps
def test_modules_of_the_working_directory_do_not_replace_those_of_python(tmp_path: Path) -> None:
    for module in ("queue", "copy", "token", "calendar"):
        (tmp_path / f"{module}.py").write_text("JOBS = []\n")
    (tmp_path / "my_rewards.py").write_text("from my_helper import score\n")
    (tmp_path / "my_helper.py").write_text("def score(response, *, prompt, answer, extra): return 1.0\n")
    words = ["run", str(EXAMPLE), "rewards.0.function=my_rewards:score", "model=nowhere"]
    script = "import sys; sys.path.remove(''); from tidemill.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "validate failed" in done.stdout and "model 'nowhere': there is no such folder" in done.stdout


@pytest.mark.slow
@pytest.mark.steps
def test_failed_step_is_named_with_one_message_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    done = run(tmp_path, "run", str(EXAMPLE), "data.train=" + str(tmp_path / "broken.jsonl"))
    assert done.returncode == 1
    assert re.search(r"validate failed: .*broken\.jsonl:2: not valid JSON", done.stdout)
    assert "log: runs/addition-1/log.txt" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "broken.jsonl:2: not valid JSON" in (tmp_path / "runs/addition-1/log.txt").read_text()
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.steps
def test_unexpected_failure_of_a_step_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("raise SystemExit(3)")
    done = run(tmp_path, "run", str(EXAMPLE), "rewards.0.function=odd:reward")
    assert done.returncode == 1
    assert "validate failed" in done.stdout and "SystemExit: 3" in done.stdout


@pytest.mark.slow
@pytest.mark.steps
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_process_and_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    with blocked_run(tmp_path) as process:
        assert len(processes_in(tmp_path)) >= 3
        process.send_signal(number)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "-m tidemill.cli.main run --resume addition-1" in out
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.steps
@pytest.mark.filterwarnings("default")
def test_run_whose_terminal_is_closed_leaves_no_process_and_is_killed_in_mlflow(tmp_path: Path) -> None:
    settings = ["name=addition-1", f"output={tmp_path / 'runs'}", "rewards.0.function=slow:reward"]
    config = load_config(EXAMPLE, settings)
    prepare_folder(config)
    run_id = Tracker.start(config).run_id
    master, slave = os.openpty()
    with blocked_run(tmp_path, "--resume", "addition-1", screen=slave) as process:
        os.close(slave)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        process.wait(TIMEOUT_S)
    assert run_id is not None and make_client(tracking_uri(config)).get_run(run_id).info.status == "KILLED"
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.steps
def test_second_interrupt_does_not_stop_the_cleanup(tmp_path: Path) -> None:
    with blocked_run(tmp_path) as process:
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.steps
def test_run_whose_launcher_was_killed_still_holds_its_folder(tmp_path: Path) -> None:
    with blocked_run(tmp_path) as process:
        left = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        try:
            done = run(tmp_path, "run", str(EXAMPLE))
        finally:
            for child in left:
                child.kill()
            psutil.wait_procs(left, timeout=60)
    assert done.returncode == 1
    assert "addition-1" in done.stderr and "still uses" in done.stderr
    [group] = re.findall(r"if that is gone, `kill -- -(\d+)` ends the rest", done.stderr)
    assert int(group) in [child.pid for child in left]


@pytest.mark.slow
@pytest.mark.steps
def test_resumed_run_has_the_same_name_and_settings(tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").write_text("{")
    first = run(tmp_path, "run", str(EXAMPLE), "seed=7", "data.train=" + str(tmp_path / "gone.jsonl"))
    assert first.returncode == 1
    again = run(tmp_path, "run", "--resume", "addition-1")
    assert again.returncode == 1
    assert "run addition-1:" in again.stdout and "gone.jsonl:1" in again.stdout
    assert again.stdout.count("  validate\n") == 1, "what an earlier attempt did is not told again"
    assert load_config(tmp_path / "runs/addition-1/config.yaml").seed == 7


@pytest.mark.slow
@pytest.mark.steps
def test_refused_settings_do_not_change_the_run_folder(tmp_path: Path) -> None:
    settings = prepare_folder(load_config(EXAMPLE, ["name=addition-1", f"output={tmp_path / 'runs'}"]))
    before = settings.read_text()
    settings.with_name("summary.json").write_text("{}")
    done = run(tmp_path, "run", "--resume", "addition-1", "rewards.0.function=exact_numbr")
    assert done.returncode == 1 and "validate failed" in done.stdout
    assert settings.read_text() == before
    assert settings.with_name("summary.json").exists()
