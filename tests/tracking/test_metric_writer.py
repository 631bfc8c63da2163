import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tidemill.retry import wait_for
from tidemill.tracking import metric_writer
from tidemill.tracking.metric_writer import MetricWriter, Point, Spool, Unwritten

SOON = 60.0


class Sink:
    """Accepts points, unless it is down; blocks while `free` is not set."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.calls = 0
        self.down = False
        self.free = threading.Event()
        self.free.set()

    def send(self, points: Sequence[Point]) -> None:
        self.calls += 1
        self.free.wait(600)
        if self.down:
            raise ConnectionError("nobody listens")
        self.points.extend(points)


def points(count: int, first: int = 0) -> list[Point]:
    return [Point("loss", float(n), n, n) for n in range(first, first + count)]


def wait_until(condition: Callable[[], bool]) -> None:
    assert wait_for(condition, SOON, 0.01)


def test_everything_arrives_in_order_and_in_batches(tmp_path: Path) -> None:
    sink = Sink()
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    for n in range(1200):
        writer.add(points(1, n))
    assert writer.close(SOON) == Unwritten()
    assert sink.points == points(1200)
    assert sink.calls <= 12
    assert list(tmp_path.iterdir()) == []


def test_a_little_arrives_without_a_full_batch(tmp_path: Path) -> None:
    sink = Sink()
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    writer.add(points(3))
    wait_until(lambda: sink.points == points(3))
    writer.close(SOON)


def test_a_dead_server_fills_the_spool_and_the_next_writer_replays_it(tmp_path: Path) -> None:
    sink = Sink()
    sink.down = True
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    writer.add(points(700))
    wait_until((tmp_path / "spool").exists)
    writer.add(points(10, 700))
    assert writer.close(SOON) == Unwritten(spooled=710)
    sink.down = False
    again = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    again.add(points(1, 710))
    assert again.close(SOON) == Unwritten()
    assert sink.points == points(711)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_comes_back_gets_the_spool_first(tmp_path: Path) -> None:
    sink = Sink()
    sink.down = True
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"), retry_s=0.01)
    writer.add(points(500))
    wait_until((tmp_path / "spool").exists)
    sink.down = False
    writer.add(points(500, 500))
    wait_until(lambda: len(sink.points) == 1000)
    assert writer.close(SOON) == Unwritten()
    assert sink.points == points(1000)


def test_a_stuck_server_neither_blocks_nor_loses_points(tmp_path: Path) -> None:
    sink = Sink()
    sink.free.clear()
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    writer.add(points(500))
    wait_until(lambda: sink.calls == 1)
    writer.add(points(100, 500))
    assert writer.close(0.05) == Unwritten(spooled=600)
    assert list(Spool(tmp_path / "spool").read()) == points(600)
    sink.free.set()
    writer.thread.join(SOON)


def test_a_full_spool_counts_dropped_points(tmp_path: Path) -> None:
    sink = Sink()
    sink.down = True
    spool = Spool(tmp_path / "spool", limit=1)
    assert spool.add(points(5))
    writer = MetricWriter(sink.send, spool)
    writer.add(points(7, 5))
    assert writer.close(SOON) == Unwritten(spooled=5, dropped=7)


def test_a_spool_that_cannot_be_written_counts_lost_points(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = Sink()
    sink.down = True
    writer = MetricWriter(sink.send, Spool(tmp_path / "file" / "spool"))
    writer.add(points(2))
    assert writer.close(SOON) == Unwritten(dropped=2)


def test_a_torn_line_does_not_stop_the_replay(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.add(points(2))
    with spool.path.open("a") as file:
        file.write('["loss", 1.')
    sink = Sink()
    assert MetricWriter(sink.send, Spool(spool.path)).close(SOON) == Unwritten()
    assert sink.points == points(2)


def test_an_artifact_is_tried_again_and_counted_if_it_never_arrives(tmp_path: Path) -> None:
    stored: list[str] = []
    failures = [OSError("no"), OSError("still no")]

    def upload() -> None:
        if failures:
            raise failures.pop()
        stored.append("report")

    def never() -> None:
        raise OSError("never")

    writer = MetricWriter(Sink().send, Spool(tmp_path / "spool"), retry_s=0.01)
    writer.submit("report", upload)
    wait_until(lambda: stored == ["report"])
    writer.submit("lost", never)
    assert writer.close(SOON) == Unwritten(artifacts=1)


def test_an_artifact_that_fails_holds_up_neither_others_nor_metrics(tmp_path: Path) -> None:
    def broken() -> None:
        raise ValueError("not an artifact")

    sink, stored = Sink(), []
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    writer.submit("broken", broken)
    writer.submit("good", lambda: stored.append("good"))
    writer.add(points(3))
    assert writer.close(SOON) == Unwritten(artifacts=1)
    assert stored == ["good"]
    assert sink.points == points(3)


def test_points_that_join_a_slow_replay_are_not_lost(tmp_path: Path) -> None:
    Spool(tmp_path / "spool").add(points(3))
    sink = Sink()
    sink.free.clear()
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    wait_until(lambda: sink.calls == 1)
    writer.add(points(2, 3))
    assert writer.close(0.05) == Unwritten(spooled=5)
    assert list(Spool(tmp_path / "spool").read()) == points(5)
    sink.free.set()
    writer.thread.join(SOON)
    assert set(sink.points) == set(points(5))
    assert list(tmp_path.iterdir()) == []


def test_artifacts_do_not_pile_up_without_bound(tmp_path: Path) -> None:
    sink = Sink()
    sink.free.clear()
    writer = MetricWriter(sink.send, Spool(tmp_path / "spool"))
    writer.add(points(500))
    wait_until(lambda: sink.calls == 1)
    for _ in range(metric_writer.PENDING_JOBS + 3):
        writer.submit("text", lambda: None)
    assert len(writer.jobs) == metric_writer.PENDING_JOBS
    sink.free.set()
    assert writer.close(SOON) == Unwritten(artifacts=3)
