"""What becomes of a run's last version: committed in any case, exported where there is time for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_rig import run_config

from tidemill.errors import StoreError
from tidemill.observe.events import EventLog
from tidemill.run import Run
from tidemill.train.stop import Stop
from tidemill.train.trainer import Position


@dataclass
class End:
    """The parts of a run that has trained, as far as its end asks anything of them."""

    done: list[str] = field(default_factory=list)
    position: Position = field(default_factory=lambda: Position(step=3, version=2))

    async def commit(self, position: Position) -> None:
        self.done.append(f"commit {position.version}")

    async def publish_model(self, version: int) -> str:
        self.done.append(f"export {version}")
        return "s3://bucket/model"

    async def upload(self, error: Exception | None) -> str:
        await asyncio.sleep(0.01)
        if error is not None:
            raise error
        self.done.append("uploaded")
        return "s3://bucket/checkpoint"

    async def close(self) -> None:
        self.done.append("closed")

    def phase(self, name: str) -> None:
        pass

    def picture(self) -> None:
        pass


@pytest.mark.parametrize(
    ("hurry", "done", "uri"), [(False, ["commit 2", "export 2"], "s3://bucket/model"), (True, ["commit 2"], None)]
)
async def test_who_is_in_a_hurry_commits_and_exports_nothing(
    tmp_path: Path, hurry: bool, done: list[str], uri: str | None
) -> None:
    stop, end = Stop(), End()
    stop.ask("the pod ends", hurry=hurry)
    with EventLog(tmp_path / "events.jsonl") as log:
        run, parts = Run(run_config(), None, log, stop), SimpleNamespace(ranks=end)
        trainer: Any = end
        assert await run.finish(trainer, parts, end, None) == uri  # type: ignore[arg-type]
    assert end.done == done


@pytest.mark.parametrize(("error", "done"), [(None, ["uploaded", "closed"]), (StoreError("it is away"), ["closed"])])
async def test_a_run_that_fails_lets_the_checkpoint_on_its_way_arrive(
    tmp_path: Path, error: Exception | None, done: list[str]
) -> None:
    end = End()
    with EventLog(tmp_path / "events.jsonl") as log:
        run = Run(run_config(), None, log, Stop())
        run.upload = asyncio.create_task(end.upload(error))
        await run.close(end)  # type: ignore[arg-type]
    assert end.done == done
