"""The commands of docs/kfp.md for KFP's own command line, as they stand there, against a server that answers as KFP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp_stub import Kfp, serving

from tidemill.steps.request import Request

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^kfp --endpoint .*$", (ROOT / "docs/kfp.md").read_text(encoding="utf-8"), re.MULTILINE)
KFP = Path(sys.executable).with_name("kfp")


@pytest.fixture(scope="module")
def server() -> Iterator[Kfp]:
    with serving() as kfp:
        yield kfp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kfp")
    (path / "run.yaml").write_text((ROOT / "examples/addition.yaml").read_text())
    (path / "pipelines").symlink_to(ROOT / "pipelines")
    return path


@pytest.mark.slow
@pytest.mark.steps
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[3:5]))
def test_command_of_the_documentation_is_taken(command: str, server: Kfp, folder: Path) -> None:
    variables = f"KFP={server.endpoint} PIPELINE=p0 VERSION=v0"
    script = f"{variables}; {command.replace('kfp', str(KFP), 1)}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.steps
def test_what_they_send_is_what_the_documentation_says(server: Kfp) -> None:
    assert len(COMMANDS) == 6
    sent = server.runs[-1]["runtime_config"]["parameters"]
    assert sent["overrides"] == "[rollout.engines=4, kubernetes.gpu_hours=12.5]"
    assert sent["config"] == (ROOT / "examples/addition.yaml").read_text().rstrip("\n")
    [schedule] = server.schedules
    assert (schedule["mode"], schedule["no_catchup"], schedule["max_concurrency"]) == ("ENABLE", True, 1)
    assert server.runs[-1].get("service_account") is None


def test_run_file_in_one_line_says_the_same_in_the_form(folder: Path) -> None:
    [command] = re.findall(r"`(python3 -c .*? < run\.yaml)`", (ROOT / "docs/kfp.md").read_text(encoding="utf-8"))
    script = command.replace("python3", sys.executable, 1)
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300, check=True)
    [line] = done.stdout.splitlines()
    assert Request(line).settings() == Request((folder / "run.yaml").read_text()).settings()
