"""The child processes of an engine: their memory, and their end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

import psutil

SIGNAL_CAUSES = {
    signal.SIGKILL: "often because memory ran out: see `dmesg`",
    signal.SIGILL: (
        "an instruction that this processor does not have; with AMX, vLLM's CPU build ends so at a prompt of a single "
        "token: use a longer prompt, or in a run rollout.dtype=float32"
    ),
}


def children() -> list[psutil.Process]:
    """All descendants of this process, except multiprocessing's resource tracker, which ends with this process."""
    return [child for child in psutil.Process().children(recursive=True) if not is_tracker(child)]


def is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def resident_bytes() -> int:
    """Resident memory of this process and its descendants."""
    return sum(map(memory_of, [psutil.Process(), *children()]))


def memory_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def end_processes(processes: Sequence[psutil.Process], patience_s: float = 10.0) -> None:
    """Wait for the processes to end by themselves; kill those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=patience_s)


def cause_of_death(ended: Mapping[str, int]) -> str:
    """Why processes ended unexpectedly; `ended` has their exit codes by name, a negative one is the signal."""
    if not ended:
        return "its core stopped working; the engine's log says why"
    return ", ".join(f"its process {name} {ending(code)}" for name, code in ended.items())


def ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    if -code not in set(signal.Signals):
        return f"was killed by signal {-code}"
    name, cause = signal.Signals(-code), SIGNAL_CAUSES.get(signal.Signals(-code))
    return f"was killed by {name.name}" + (f" ({cause})" if cause else "")
