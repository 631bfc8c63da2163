"""How a launcher ends its processes; each test has a process of its own, because a subreaper stays one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {code!r}], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""
REAPER = """
import os, subprocess, sys, time
from tidemill.cluster.processes import adopt_orphans, collect_orphans, descendants, end_descendants
adopt_orphans()
parent = subprocess.run([sys.executable, "-c", {orphan!r}], stdout=subprocess.PIPE, text=True)
pid = int(parent.stdout)
{body}
"""
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def reap(code: str, body: str) -> str:
    script = REAPER.format(orphan=ORPHAN.format(code=code), body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_process_that_lost_its_parent_in_another_session_is_found_and_ended() -> None:
    out = reap(SLEEP, "print(pid, [p.pid for p in descendants()], end_descendants(5.0))")
    pid = int(out.split("[")[1].split("]")[0])
    assert out.split()[-1] == "1"
    assert not psutil.pid_exists(pid)


def test_ended_process_is_reaped() -> None:
    out = reap(SLEEP, "import psutil; end_descendants(5.0); print(psutil.Process().children())")
    assert out.split()[-1] == "[]"


def test_process_that_ignores_the_request_is_killed() -> None:
    out = reap(STUBBORN, "time.sleep(1); end_descendants(0.5); print(pid)")
    assert not psutil.pid_exists(int(out.split()[-1]))


def test_spared_process_goes_on() -> None:
    out = reap(SLEEP, "print(end_descendants(0.5, spare=pid), len(descendants()), end_descendants(5.0))")
    assert out.split()[-3:] == ["0", "1", "1"]


def test_ended_orphan_is_reaped_but_not_our_own_child() -> None:
    body = """
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
deadline = time.monotonic() + 120
while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
    collect_orphans(-1 if own.poll() is not None else own.pid)
    time.sleep(0.05)
print(os.path.exists(f"/proc/{pid}"), own.wait())
"""
    assert reap("pass", body).split()[-2:] == ["False", "7"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has subreapers")
def test_orphan_becomes_a_child_of_the_reaper(tmp_path: Path) -> None:
    out = reap(SLEEP, "import psutil; print(psutil.Process(pid).ppid() == os.getpid()); end_descendants(5.0)")
    assert out.split()[-1] == "True"
