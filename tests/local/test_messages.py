"""The messages of a run on this machine."""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_rig import parsed
from rich.console import Console

from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig, TrackingConfig
from tidemill.local.messages import (
    generate_command,
    keep_ray_logs,
    mlflow_command,
    print_full_disk,
    print_interrupted,
    print_started,
    program,
    report_end,
    shown,
    tail_of,
)
from tidemill.observe.report import Summary
from tidemill.steps.run_folder import prepare_folder

SUMMARY = Summary(1, None, None, 1.0, 1.0, 1.0, None, None, None, None, None, None, None, None)


def test_paths_are_relative_to_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs/a") == Path("runs/a")
    assert shown(Path("/elsewhere")) == Path("/elsewhere")


def test_program_is_named_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program(".venv/bin/tidemill") == ".venv/bin/tidemill"


def test_installed_program_has_its_short_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "tidemill"
    installed.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program(str(installed)) == "tidemill"
    assert program("-c") == "-c"


def asked(config: RunConfig, **facts: str) -> SimpleNamespace:
    """The parsed command that is printed at the end of a run."""
    words = shlex.split(generate_command(config, replace(SUMMARY, **facts)))
    return SimpleNamespace(**parsed(words[words.index("generate") :]))


def test_commands_at_the_end_find_what_the_run_left(addition: RunConfig) -> None:
    config = addition.model_copy(update={"output": addition.output.with_name("my runs")})
    (config.folder / "model").mkdir(parents=True)
    left = asked(config)
    assert (left.model, left.output) == (str(config.folder / "model"), str(config.output))
    assert (left.endpoint, left.tracking) == ("embedded", None)
    assert mlflow_command(config).endswith(f" ui --output '{config.output}'")


def test_commands_at_the_end_name_the_servers_that_the_run_had(addition: RunConfig) -> None:
    store, mlflow = StoreConfig(endpoint="http://store:9000"), TrackingConfig(uri="http://mlflow:5000")
    config = addition.model_copy(update={"store": store, "tracking": mlflow})
    left = asked(config, model_uri="s3://tidemill/runs/a/model/3")
    assert left.model == "s3://tidemill/runs/a/model/3", "there is no folder of it here"
    assert asked(config, model_version="a/1").model == "models:/a/1"
    assert (left.endpoint, left.tracking, mlflow_command(config)) == (store.endpoint, mlflow.uri, mlflow.uri)
    file = addition.model_copy(update={"tracking": TrackingConfig(uri="sqlite:////data/my.db")})
    assert mlflow_command(file) == "mlflow server --backend-store-uri sqlite:////data/my.db"


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


def test_lines_are_printed_unchanged(addition: RunConfig, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    print_started(addition.model_copy(update={"name": "addition-1", "output": tmp_path / "my[red]runs"}), console)
    print_interrupted("tidemill run --resume addition-1", console)
    first, second = on(console).splitlines()
    folder = tmp_path / "my[red]runs/addition-1"
    assert first == f"run addition-1: its files are in {folder}; Ctrl-C ends it"
    assert second == "interrupted; `tidemill run --resume addition-1` resumes from the newest checkpoint"


def test_logs_of_ray_are_copied(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert len(list((tmp_path / "run/ray-logs").iterdir())) == 3
    assert on(screen) == ""


def test_failed_copies_of_rays_logs_are_one_line(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    for number in range(3):  # where a file should go there is a folder
        (tmp_path / f"run/ray-logs/worker-{number}.out/worker-{number}.out").mkdir(parents=True)
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert re.fullmatch(r"3 of Ray's logs could not be copied: .*Is a directory.*\n", on(screen))


def test_rays_logs_without_a_folder_are_one_line(tmp_path: Path, screen: Console) -> None:
    logs_of_ray(tmp_path)
    (tmp_path / "run").write_text("no folder")
    keep_ray_logs(tmp_path, tmp_path / "run", screen)
    assert re.fullmatch(r"Ray's logs could not be copied: .*Not a directory.*\n", on(screen))


@pytest.mark.parametrize(("status", "failure"), [(0, None), (1, None), (0, "{"), (1, "{}")])
def test_report_works_with_missing_or_broken_files(
    addition: RunConfig, screen: Console, status: int, failure: str | None
) -> None:
    prepare_folder(addition)
    if failure is not None:
        (addition.folder / "failure.json").write_text(failure)
    (addition.folder / "log.txt").write_text("the last words")
    assert report_end(addition, status, "tidemill run", screen) == 1
    assert "the last words" in on(screen) and "log.txt" in on(screen)


def test_report_needs_no_log(addition: RunConfig, screen: Console) -> None:
    assert report_end(addition, 1, "tidemill run", screen) == 1
    assert "there is no log" in on(screen)


def test_full_disk_is_named_with_the_command_to_resume(addition: RunConfig, screen: Console) -> None:
    print_full_disk(addition, "tidemill run --resume addition-1", screen)
    assert on(screen) == ""
    print_full_disk(addition, "tidemill run --resume addition-1", screen, full_bytes=2**62)
    assert re.match(r"no space left below .*: free some, then `tidemill run --resume addition-1`", on(screen))


def test_tail_is_the_end_of_a_text() -> None:
    assert tail_of("a\nb\nc\n\n", 2) == "b\nc"
