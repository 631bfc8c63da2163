"""What a run commits and when, and what becomes of its last version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_rig import run_config

from tidemill.driver.resume import Restart
from tidemill.driver.run import Run
from tidemill.errors import RunError, StoreError
from tidemill.observe.events import EventLog
from tidemill.protocols import Answer, Evaluation
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
    ("immediate", "done", "uri"),
    [(False, ["commit 2", "export 2", "uploaded"], "s3://bucket/model"), (True, ["commit 2", "uploaded"], None)],
)
async def test_an_immediate_stop_commits_and_exports_nothing(
    tmp_path: Path, immediate: bool, done: list[str], uri: str | None
) -> None:
    stop, end = Stop(), End()
    stop.ask("the pod ends", immediate=immediate)
    with EventLog(tmp_path / "events.jsonl") as log:
        run, parts = Run(run_config(), None, log, stop), SimpleNamespace(ranks=end)
        run.upload = asyncio.create_task(end.upload(None))
        trainer: Any = end
        assert await run.finish(trainer, parts, end) == uri  # type: ignore[arg-type]
    assert end.done == done


async def test_a_model_without_its_checkpoint_is_not_the_end_of_a_run(tmp_path: Path) -> None:
    end = End()
    with EventLog(tmp_path / "events.jsonl") as log:
        run, parts = Run(run_config(), None, log, Stop()), SimpleNamespace(ranks=end)
        run.upload = asyncio.create_task(end.upload(StoreError("it is away")))
        with pytest.raises(StoreError, match="it is away"):
            await run.finish(end, parts, end)  # type: ignore[arg-type]
    assert end.done == ["commit 2", "export 2"]


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


async def test_an_upload_that_takes_too_long_is_told_once_and_does_not_hide_why_the_run_ends(
    tmp_path: Path,
) -> None:
    end = End()
    with EventLog(tmp_path / "events.jsonl") as log:
        run = Run(run_config(), None, log, Stop(), upload_timeout_s=0.01)
        run.upload = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        with pytest.raises(RunError, match=r"a checkpoint was not stored within 0\.01 s"):
            try:
                await run.settle()
            finally:
                await run.close(end)  # type: ignore[arg-type]
    assert end.done == ["closed"]


@dataclass
class Ranks:
    """Stages a checkpoint at once and uploads it slowly; `done` is in the order of what ended."""

    done: list[str] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)

    async def ledger_state(self) -> Mapping[str, object]:
        self.done.append("ledger")
        return {"cursor": len(self.done)}

    async def snapshot(self) -> None:
        self.done.append("snapshot")

    async def upload(self, version: int, state: Mapping[str, Any]) -> str:
        await asyncio.sleep(0.01)
        self.done.append(f"upload {version}")
        self.states.append(state)
        return f"s3://bucket/{version}"


async def test_a_commit_waits_for_the_upload_before_and_holds_the_run_as_it_is_then(tmp_path: Path) -> None:
    ranks, observer = (
        Ranks(),
        SimpleNamespace(tracker=SimpleNamespace(run_id="mlflow-run"), evaluated=None, notice=None),
    )
    before, position = Evaluation(0, 0.5, (Answer("1 + 1", "2", "2", 0.5),)), Position(step=2, version=1)
    parts: Any = SimpleNamespace(ranks=ranks, generation=ranks, queue=None, fleet=None)
    with EventLog(tmp_path / "events.jsonl") as log:
        run = Run(run_config(), None, log, Stop())
        trainer = run.make_trainer(parts, observer, None, before)  # type: ignore[arg-type]
        assert trainer.commit is not None
        await trainer.commit(position)
        position.step, position.version = 4, 2  # training goes on during the upload
        await trainer.commit(position)
        await run.settle()
    once = ["ledger", "snapshot"]
    assert ranks.done == [*once, "upload 1", *once, "upload 2"]
    assert run.checkpoint_uri == "s3://bucket/2"
    restarts = [Restart.from_state(state) for state in ranks.states]
    assert [(restart.position.step, restart.position.version) for restart in restarts] == [(2, 1), (4, 2)]
    assert [(restart.mlflow_run_id, restart.held_out_before) for restart in restarts] == [("mlflow-run", before)] * 2
    assert [restart.ledger for restart in restarts] == [{"cursor": 1}, {"cursor": 4}]
