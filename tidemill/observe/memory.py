"""Peak memory of a run over all its processes."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil


class MemoryMeter:
    """Samples the memory of this process and all its descendants in a thread; shared pages count once (PSS).

    A context manager; `peak_bytes` is the largest sum seen.
    """

    def __init__(self, period_s: float = 5.0) -> None:
        self.peak_bytes = 0
        self.period_s = period_s
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.sample_until_stopped, name="memory-meter", daemon=True)

    def __enter__(self) -> MemoryMeter:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self.thread.join(timeout=self.period_s)
        self.peak_bytes = max(self.peak_bytes, tree_bytes())

    def sample_until_stopped(self) -> None:
        """Take a sample every period."""
        while not self.stopped.wait(self.period_s):
            self.peak_bytes = max(self.peak_bytes, tree_bytes())


def tree_bytes() -> int:
    """Proportional set size of this process and its descendants, in bytes; one that just ended counts nothing."""
    root = psutil.Process()
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total
