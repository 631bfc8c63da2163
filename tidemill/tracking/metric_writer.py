"""Writes metrics and artifacts from its own thread, so that a slow or dead MLflow never delays the training.

    log ─► memory ─► one batch a second, or per 500 points ─► MLflow
                          └─ no answer ─► spool file ─► replayed after the outage, at the end, or by a resume

A batch without an answer is sent again unchanged; MLflow drops exact duplicates (key, step, time, value).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path

BATCH = 500
INTERVAL_S = 1.0
RETRY_S = 10.0
SPOOL_BYTES = 64 << 20
"""About 700 000 points; more are dropped and counted."""
PENDING_JOBS = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric; `milliseconds` since the epoch."""

    key: str
    value: float
    milliseconds: int
    step: int


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Points in the spool file, lost points, and lost artifacts."""

    spooled: int = 0
    dropped: int = 0
    artifacts: int = 0

    def __bool__(self) -> bool:
        return bool(self.spooled or self.dropped or self.artifacts)


class Spool:
    """A JSON-lines file of points that wait for MLflow. Not thread-safe."""

    def __init__(self, path: Path, limit: int = SPOOL_BYTES) -> None:
        self.path, self.limit = path, limit
        self.waiting = sum(1 for _ in self.read()) if path.exists() else 0

    def add(self, points: Sequence[Point]) -> bool:
        """Append points; returns False if the file is full."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size >= self.limit:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(astuple(point)) + "\n" for point in points)
        self.waiting += len(points)
        return True

    def read(self) -> Iterator[Point]:
        """All points, without a line that a crash cut off."""
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    yield Point(*json.loads(line))
                except (ValueError, TypeError):
                    log.warning("%s: skipped an incomplete line", self.path)

    def replay(self, send: Callable[[Sequence[Point]], None]) -> None:
        """Send everything, in order, and remove the file."""
        points, sent = self.read(), 0
        while batch := list(islice(points, BATCH)):
            send(batch)
            sent += len(batch)
        if sent == self.waiting:  # otherwise a `close` that timed out has added points
            self.path.unlink()
            self.waiting = 0


class MetricWriter:
    """Sends from a thread. `add` and `submit` never wait for MLflow, and any thread may call them."""

    def __init__(self, send: Callable[[Sequence[Point]], None], spool: Spool, retry_s: float = RETRY_S) -> None:
        self.send, self.spool, self.retry_s = send, spool, retry_s
        self.points: deque[Point] = deque()
        self.in_flight: list[Point] = []
        self.jobs: deque[tuple[str, Callable[[], None]]] = deque()
        self.dropped = self.lost_jobs = 0
        self.jobs_after = 0.0
        self.job_running = False
        self.failed_jobs: set[str] = set()
        self.down_until: float | None = None
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.run, name="tidemill-metrics", daemon=True)
        self.thread.start()

    def add(self, points: Sequence[Point]) -> None:
        """Queue points."""
        with self.changed:
            self.points.extend(points)
            if len(self.points) >= BATCH:
                self.changed.notify()

    def submit(self, name: str, job: Callable[[], None]) -> None:
        """Queue an artifact: `job` uploads it and is repeated until it succeeds."""
        with self.changed:
            self.jobs.append((name, job))
            if len(self.jobs) > PENDING_JOBS:
                self.jobs.popleft()
                self.lost_jobs += 1

    def close(self, timeout_s: float) -> Unwritten:
        """Write the rest within `timeout_s`; returns what is left in the spool file or lost."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(timeout_s)
        with self.changed:
            if self.thread.is_alive():
                self.keep([*self.in_flight, *self.points])
            return Unwritten(self.spool.waiting, self.dropped, self.lost_jobs + len(self.jobs) + self.job_running)

    def run(self) -> None:
        """The thread: gather and write until closed."""
        closing = False
        while not closing:
            closing = self.gather()
            if self.down_until is not None and time.monotonic() < self.down_until and not closing:
                self.keep(self.in_flight)
                continue
            # Any error of MLflow, its database or its HTTP client is logged, and the points are kept.
            try:
                self.write()
                self.run_jobs(closing)
            except Exception as error:  # noqa: BLE001
                self.fail(error)

    def gather(self) -> bool:
        """Wait for a full batch or the end of the interval; move the points to `in_flight`."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or len(self.points) >= BATCH, INTERVAL_S)
            self.in_flight = list(self.points)
            self.points.clear()
            return self.closing

    def write(self) -> None:
        """Send all waiting points, oldest first."""
        if self.spool.waiting:
            self.spool.replay(self.send)
        for start in range(0, len(self.in_flight), BATCH):
            self.send(self.in_flight[start : start + BATCH])
        with self.changed:
            self.in_flight = []
        if self.down_until is not None:
            self.down_until = None
            log.warning("MLflow answers again; all metrics are sent")

    def run_jobs(self, closing: bool) -> None:
        """Upload artifacts. A failing one goes to the end of the queue, and delays neither the others nor metrics."""
        if time.monotonic() < self.jobs_after and not closing:
            return
        for _ in range(len(self.jobs)):
            with self.changed:
                name, job = self.jobs.popleft()
                self.job_running = True
            try:
                job()
            except Exception as error:  # noqa: BLE001 - logged, and counted if it never succeeds
                self.put_back(name, job, error)
                if not closing:
                    return
            finally:
                self.job_running = False

    def put_back(self, name: str, job: Callable[[], None], error: Exception) -> None:
        """Queue an artifact again; log its first failure."""
        if name not in self.failed_jobs:
            self.failed_jobs.add(name)
            log.warning("the artifact %s cannot be uploaded to MLflow; trying again later: %s", name, error)
        self.submit(name, job)
        self.jobs_after = time.monotonic() + self.retry_s

    def fail(self, error: Exception) -> None:
        """Keep the unsent points, and pause requests to MLflow."""
        if self.down_until is None:
            log.warning("metrics cannot be sent to MLflow; they are kept in %s: %s", self.spool.path, error)
        self.down_until = time.monotonic() + self.retry_s
        self.keep(self.in_flight)

    def keep(self, points: Sequence[Point]) -> None:
        """Add points to the spool file, or count them as dropped."""
        try:
            stored = not points or self.spool.add(points)
        except OSError as error:
            log.warning("%d points are lost: %s", len(points), error)
            stored = False
        if not stored:
            self.dropped += len(points)
        self.in_flight = []
