"""`tidemill run` as a person runs it: in a process of its own."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cli_rig import parsed
from rich.console import Console

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig, TrackingConfig
from tidemill.driver.failure import Failure
from tidemill.driver.restart import identity
from tidemill.errors import ConfigError, ModelError, RunError
from tidemill.local.launch import go_on, start
from tidemill.local.outcome import (
    curves,
    generate_command,
    keep_ray_logs,
    program,
    report,
    say_full,
    say_interrupted,
    say_started,
    shown,
    tail_of,
)
from tidemill.local.run_folder import begin, earlier, exclusive, fresh
from tidemill.observe.report import Summary
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.server import embedded_store
from tidemill.tracking.mlflow_server import make_client, tracking_uri
from tidemill.tracking.tracker import Tracker

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/addition.yaml"
TIMEOUT_S = 300
SUMMARY = Summary(1, None, None, 1.0, 1.0, 1.0, None, None, None, None, None, None, None, None)
SLOW_REWARD = """
import time
open("imported", "w").close()
time.sleep(600)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.cli.main", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes that work in a folder or were told of it."""
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
    """A run whose validation does not end, because the module of its reward sleeps; yields once it does."""
    (folder / "slow.py").write_text(SLOW_REWARD)
    words = command("run", *(arguments or (str(EXAMPLE), "rewards.0.function=slow:reward")))
    # Below the folder, because a launcher that is killed cannot remove what it made.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=screen, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (folder / "imported").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.fixture
def example() -> RunConfig:
    return load_config(EXAMPLE)


def moved(config: RunConfig, output: Path) -> RunConfig:
    return config.model_copy(update={"output": output})


def test_every_start_gets_a_name_and_a_folder_of_its_own(example: RunConfig, tmp_path: Path) -> None:
    names = [fresh(moved(example, tmp_path / "runs")).name for _ in range(3)]
    assert names == ["addition-1", "addition-2", "addition-3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


def test_name_under_which_the_store_has_a_checkpoint_is_not_fresh(example: RunConfig, tmp_path: Path) -> None:
    first = fresh(moved(example, tmp_path / "runs"))
    (first.folder / "part").write_text("weights")
    with open_checkpoints(first) as checkpoints:
        checkpoints.commit(1, first.folder, {})
    shutil.rmtree(first.folder)
    assert fresh(moved(example, tmp_path / "runs")).name == "addition-2"


def test_machines_that_share_a_store_give_no_name_twice(
    example: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_store(tmp_path / "shared") as server:
        monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server.access_key)
        monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server.secret_key)
        shared = example.model_copy(update={"store": StoreConfig(endpoint=server.endpoint)})
        names = [fresh(moved(shared, tmp_path / machine)).name for machine in ("one", "two", "one")]
    assert names == ["addition-1", "addition-2", "addition-3"]


def test_versions_of_several_runs_stand_under_one_model(example: RunConfig, tmp_path: Path) -> None:
    assert fresh(moved(example, tmp_path)).registered_model == "addition"


def test_output_that_is_a_file_is_refused(example: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match=r"cannot make|not a folder"):
        fresh(moved(example, tmp_path / "runs"))


def test_name_that_leaves_no_room_for_a_number_is_refused(example: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^name = "):
        fresh(example.model_copy(update={"name": "a" * 63, "output": tmp_path}))


def test_unknown_run_is_refused_with_those_that_exist(example: RunConfig, tmp_path: Path) -> None:
    config = fresh(moved(example, tmp_path))
    (config.folder / "config.yaml").write_text(config.to_yaml())
    assert earlier("addition-1", tmp_path, ["trainer.steps=30"]).trainer.steps == 30
    with pytest.raises(ConfigError, match="addition-1"):
        earlier("addition-7", tmp_path, [])


@pytest.mark.parametrize("change", ["name=other", "output=elsewhere"])
def test_resumed_run_keeps_name_and_output(addition: RunConfig, change: str) -> None:
    begin(addition)
    with pytest.raises(ConfigError, match=change.replace("=", " = '")):
        earlier("addition", addition.output, [change])


def test_run_whose_folder_was_moved_goes_on_there(addition: RunConfig, tmp_path: Path) -> None:
    begin(addition)
    addition.output.rename(tmp_path / "moved: here")
    assert earlier("addition", tmp_path / "moved: here", []).output == tmp_path / "moved: here"
    (tmp_path / "moved: here/addition").rename(tmp_path / "moved: here/other")
    with pytest.raises(ConfigError, match="the run's own name, addition"):
        earlier("other", tmp_path / "moved: here", [])


def test_settings_that_its_checkpoints_do_not_fit_leave_an_earlier_run_as_it_was(
    addition: RunConfig, tmp_path: Path
) -> None:
    settings = begin(addition)
    before = settings.read_text()
    (addition.folder / "summary.json").write_text("{}")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.safetensors").touch()
    with open_checkpoints(addition) as checkpoints:
        checkpoints.commit(1, tmp_path / "parts", {"identity": identity(addition)})
    other = earlier("addition", addition.output, ["asynchrony.max_staleness=2"])
    with pytest.raises(
        ConfigError, match=r"^asynchrony\.max_staleness = 2: allowed is 1, the value at the start of addition"
    ):
        go_on(other, Console(file=io.StringIO()))
    assert settings.read_text() == before
    assert (addition.folder / "summary.json").exists()


def test_second_run_below_the_same_folder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path, "addition-1"),
        pytest.raises(RunError, match=r"addition-1 \(process \d+\) is still going on"),
        exclusive(tmp_path, "addition-2"),
    ):
        pass
    with exclusive(tmp_path, "addition-3"):
        pass


def test_paths_are_shown_as_a_person_types_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs/a") == Path("runs/a")
    assert shown(Path("/elsewhere")) == Path("/elsewhere")


def test_program_is_named_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [".venv/bin/tidemill", "run"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/tidemill"


def test_program_that_is_no_file_is_named_beside_one_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "tidemill"
    installed.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert program() == "tidemill"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert program() == "-c"


def asked(config: RunConfig, **facts: str) -> SimpleNamespace:
    """The arguments of the command that is shown at the end of a run."""
    words = shlex.split(generate_command(config, replace(SUMMARY, **facts)))
    return SimpleNamespace(**parsed(words[words.index("generate") :]))


def test_commands_at_the_end_find_what_the_run_left(addition: RunConfig) -> None:
    config = addition.model_copy(update={"output": addition.output.with_name("my runs")})
    (config.folder / "model").mkdir(parents=True)
    left = asked(config)
    assert (left.model, left.output) == (str(config.folder / "model"), str(config.output))
    assert (left.endpoint, left.tracking) == ("embedded", None)
    assert curves(config).endswith(f" ui --output '{config.output}'")


def test_commands_at_the_end_name_the_servers_that_the_run_had(addition: RunConfig) -> None:
    store, mlflow = StoreConfig(endpoint="http://store:9000"), TrackingConfig(uri="http://mlflow:5000")
    config = addition.model_copy(update={"store": store, "tracking": mlflow})
    left = asked(config, model_uri="s3://tidemill/runs/a/model/3")
    assert left.model == "s3://tidemill/runs/a/model/3", "there is no folder of it here"
    assert asked(config, model_version="a/1").model == "models:/a/1"
    assert (left.endpoint, left.tracking, curves(config)) == (store.endpoint, mlflow.uri, mlflow.uri)
    file = addition.model_copy(update={"tracking": TrackingConfig(uri="sqlite:////data/my.db")})
    assert curves(file) == "mlflow server --backend-store-uri sqlite:////data/my.db"


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=200)


def on(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def logs_of_ray(scratch: Path) -> Path:
    logs = scratch / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for number in range(3):
        (logs / f"worker-{number}.out").write_text("died")
    return logs


def test_what_stands_in_a_line_is_shown_as_it_is(addition: RunConfig, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    say_started(addition.model_copy(update={"name": "addition-1", "output": tmp_path / "my[red]runs"}), console)
    say_interrupted("tidemill run --resume addition-1", console)
    first, second = on(console).splitlines()
    folder = tmp_path / "my[red]runs/addition-1"
    assert first == f"run addition-1: everything about it stands in {folder}; Ctrl-C ends it"
    assert second == "interrupted; `tidemill run --resume addition-1` goes on from the newest checkpoint"


def test_logs_of_ray_are_kept(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert len(list((tmp_path / "run/ray-logs").iterdir())) == 3
    assert on(screen) == ""


def test_logs_of_ray_that_cannot_be_kept_are_one_line(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    for number in range(3):  # where a file should go there is a folder
        (tmp_path / f"run/ray-logs/worker-{number}.out/worker-{number}.out").mkdir(parents=True)
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert re.fullmatch(r"3 of Ray's logs could not be kept: .*Is a directory.*\n", on(screen))


def test_logs_of_ray_without_a_place_are_one_line(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    (tmp_path / "run").write_text("no folder")
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert re.fullmatch(r"Ray's logs could not be kept: .*Not a directory.*\n", on(screen))


@pytest.mark.parametrize(("status", "failure"), [(0, None), (1, None), (0, "{"), (1, "{}")])
def test_report_survives_what_a_full_disk_did_not_take(
    addition: RunConfig, screen: Console, status: int, failure: str | None
) -> None:
    begin(addition)
    if failure is not None:
        (addition.folder / "failure.json").write_text(failure)
    (addition.folder / "log.txt").write_text("the last words")
    assert report(addition, status, "tidemill run", screen) == 1
    assert "the last words" in on(screen) and "log.txt" in on(screen)


def test_report_needs_no_log(addition: RunConfig, screen: Console) -> None:
    assert report(addition, 1, "tidemill run", screen) == 1
    assert "there is no log" in on(screen)


def test_full_disk_is_named_with_how_to_go_on(
    addition: RunConfig, screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_full(addition, "tidemill run --resume addition-1", screen)
    assert on(screen) == ""
    full = type(shutil.disk_usage("/"))(10**9, 10**9 - 4096, 4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    say_full(addition, "tidemill run --resume addition-1", screen)
    assert re.match(r"no space left below .*: free some, then `tidemill run --resume addition-1`", on(screen))


def test_start_that_cannot_write_keeps_the_settings_of_the_attempt_before(addition: RunConfig) -> None:
    settings = begin(addition)
    before = settings.read_text()
    settings.with_name(".config.yaml.partial").mkdir()
    with pytest.raises(RunError, match="cannot write to"):
        begin(addition.model_copy(update={"seed": 9}))
    assert settings.read_text() == before


def test_new_attempt_forgets_how_the_last_one_ended(addition: RunConfig) -> None:
    begin(addition)
    Failure.of("train", ValueError("x")).write(addition.folder)
    (addition.folder / "summary.json").write_text("{}")
    begin(addition)
    assert [path.name for path in addition.folder.iterdir()] == ["config.yaml"]


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_model_that_no_alias_names_is_refused_before_there_is_a_run(
    addition: RunConfig, screen: Console, empty_mlflow: Path
) -> None:
    addition.output.mkdir()
    shutil.copy(empty_mlflow, addition.output / "mlflow.db")
    with pytest.raises(ModelError, match="is not in the registry"):
        start(addition.model_copy(update={"model": "models:/gone@champion"}), screen)
    assert not (addition.output / "addition-1").exists()


def test_start_that_the_lock_refuses_makes_no_folder(addition: RunConfig, screen: Console) -> None:
    with exclusive(addition.output, "addition-1"), pytest.raises(RunError, match="still going on"):
        start(addition, screen)
    assert [path.name for path in addition.output.iterdir()] == ["run.lock"]


def test_tail_is_the_end_of_a_text() -> None:
    assert tail_of("a\nb\nc\n\n", 2) == "b\nc"


@pytest.mark.slow
@pytest.mark.steps
def test_failed_step_is_named_with_one_message_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    done = run(tmp_path, "run", str(EXAMPLE), "data.train=" + str(tmp_path / "broken.jsonl"))
    assert done.returncode == 1
    assert re.search(r"validate failed: .*broken\.jsonl:2: not valid JSON", done.stdout)
    assert "log: runs/addition-1/log.txt" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Traceback" in (tmp_path / "runs/addition-1/log.txt").read_text()
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.steps
def test_step_that_breaks_in_a_way_nobody_foresaw_shows_where(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("raise SystemExit(3)")
    done = run(tmp_path, "run", str(EXAMPLE), "rewards.0.function=odd:reward")
    assert done.returncode == 1
    assert "validate failed" in done.stdout and "SystemExit: 3" in done.stdout


@pytest.mark.slow
@pytest.mark.steps
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_process_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
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
def test_run_whose_terminal_is_closed_leaves_no_process_and_is_no_longer_running_in_mlflow(tmp_path: Path) -> None:
    settings = ["name=addition-1", f"output={tmp_path / 'runs'}", "rewards.0.function=slow:reward"]
    config = load_config(EXAMPLE, settings)
    begin(config)
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
def test_second_interrupt_does_not_stop_the_cleaning_up(tmp_path: Path) -> None:
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
    assert "addition-1" in done.stderr and "is still going on" in done.stderr
    [group] = re.findall(r"where that is gone, `kill -- -(\d+)` ends the rest", done.stderr)
    assert int(group) in [child.pid for child in left]


@pytest.mark.slow
@pytest.mark.steps
def test_resume_goes_on_under_the_same_name_with_the_same_settings(tmp_path: Path) -> None:
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
def test_settings_that_are_refused_leave_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    settings = begin(load_config(EXAMPLE, ["name=addition-1", f"output={tmp_path / 'runs'}"]))
    before = settings.read_text()
    settings.with_name("summary.json").write_text("{}")
    done = run(tmp_path, "run", "--resume", "addition-1", "rewards.0.function=exact_numbr")
    assert done.returncode == 1 and "validate failed" in done.stdout
    assert settings.read_text() == before
    assert settings.with_name("summary.json").exists()
