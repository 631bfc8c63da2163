"""The engines of a run: the owner of their membership.

A lost engine is replaced, and the number of engines follows the load. Each engine occupies a slot, and a task watches
each slot. An engine is lost when it does not answer a probe, when the rollouter cannot reach it, or when it drops out
of a publication. It then leaves the rotation, which issues its groups again, and its process is ended. The next engine
of the slot starts, gets the newest version from the `Synchronizer` and only then its first group. Meanwhile the other
engines go on. On a cluster the new engine waits for its pod.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tidemill.errors import EngineError, RunError, StoreError, TidemillError
from tidemill.protocols import Engine, PauseMode
from tidemill.records import EngineId
from tidemill.rollout.elasticity import Elasticity
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.task_group import task_group
from tidemill.weights.synchronizer import Synchronizer


class Member(Engine, Protocol):
    """An engine of the fleet: `actors.engine.RemoteEngine`."""

    @property
    def id(self) -> EngineId:
        """Names the engine."""
        ...

    async def start(self) -> None:
        """Wait until Ray has placed the engine and it has loaded its model.

        Raises:
            EngineError: it could not.
        """
        ...

    async def end(self) -> None:
        """End the process; it gets time to free its resources if it still answers."""
        ...

    def kill(self) -> None:
        """End the process at once, also one that Ray has not placed yet."""
        ...


class Rotation(Protocol):
    """Sends groups to the engines: `actors.rollouter.RemoteRollouter`."""

    async def add_engine(self, engine_id: EngineId, engine: Member) -> None:
        """Send groups to this engine, which has the newest version."""
        ...

    async def remove_engine(self, engine_id: EngineId, reason: str, drain_s: float = 0.0) -> int:
        """Send this engine no more groups; those that it does not finish in time are issued again.

        Returns:
            How many groups it finished, and how many prompts were quarantined because they crashed it.
        """
        ...

    async def cordon_engine(self, engine_id: EngineId) -> None:
        """Send this engine no more groups, except held-out prompts that name it; it finishes those that it has."""
        ...

    async def uncordon_engine(self, engine_id: EngineId) -> None:
        """Send groups to this engine again, unless it has been removed."""
        ...

    async def lost_engines(self) -> Mapping[EngineId, str]:
        """The engines that cannot be reached from the rollouter, and why."""
        ...


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Deadlines and intervals of a fleet."""

    start_timeout_s: float  # for a new engine to be placed and to load
    group_timeout_s: float = 600.0  # for a retired engine to finish its groups
    probe_interval_s: float = 2.0  # between two probes of an engine
    probe_timeout_s: float = 60.0  # an engine that does not answer a probe in time is stuck
    retry_s: float = 5.0  # between two attempts to replace an engine
    losses: int = LOSSES  # engines of one slot that may die one after the other without finishing a group


class Fleet:
    """Keeps an engine in every slot and publishes versions to all of them.

    A slot has the id of its first engine.

    Args:
        members: the engines of the start, which have loaded.
        start: places an engine with this id; it loads when its `start` is called.
        limits: deadlines and intervals.
        rotation: the rollouter.
        synchronizer: brings versions to the engines.
        notice: shows a message to the user.
        elasticity: decides when an engine is added or retired; None keeps their number.
    """

    def __init__(
        self,
        members: Sequence[Member],
        start: Callable[[EngineId], Member],
        limits: FleetLimits,
        rotation: Rotation,
        synchronizer: Synchronizer,
        notice: Callable[[str], None],
        elasticity: Elasticity | None = None,
    ) -> None:
        self._start, self._limits, self._elasticity = start, limits, elasticity
        self._rotation, self._synchronizer, self._notice = rotation, synchronizer, notice
        self._members = {member.id: member for member in members}  # by slot
        self._watches: dict[EngineId, asyncio.Task[None]] = {}  # by slot
        self._losses: dict[EngineId, asyncio.Future[str]] = {}  # why an engine is lost, once it is
        self._ids = map(EngineId, itertools.count(len(members)))
        self._crashes = CrashLoop(time.monotonic)
        self._mode: PauseMode = "keep"
        self._spare: EngineId | None = None
        self._change: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    async def publish(
        self, version: int, mode: PauseMode, exported: Callable[[], None] = lambda: None
    ) -> Mapping[str, float]:
        self._mode = mode
        adopted = await self._synchronizer.publish(self._adopting, version, mode, exported)
        for engine_id, error in adopted.lost.items():
            self._report(engine_id, str(error))
        return adopted.metrics

    def _adopting(self) -> Mapping[EngineId, Engine]:
        """The members that take new versions: all but the spare one and the lost ones."""
        lost = {engine_id for engine_id, loss in self._losses.items() if loss.done()}
        return {member.id: member for member in self.members if member.id not in lost | {self._spare}}

    async def reserve_spare(self) -> EngineId | None:
        if len(self._members) < 2:
            return None
        self._spare = self.members[-1].id
        await self._rotation.cordon_engine(self._spare)
        return self._spare

    async def release_spare(self, engine_id: EngineId) -> None:
        """Give the spare engine the newest version, and groups again; a lost one is left alone."""
        try:
            for member in self.members:
                if member.id == engine_id:
                    await self._catch_up(member)
        finally:
            self._spare = None

    async def _catch_up(self, member: Member) -> None:
        try:
            async with self._synchronizer.joining(member.id, member, self._mode):
                self._spare = None
        except (EngineError, StoreError) as error:
            self._report(member.id, str(error))
        else:
            await self._rotation.uncordon_engine(member.id)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Replace lost engines while the body runs.

        Raises:
            EngineError: the engines of a slot die one after the other, see `CrashLoop`.
            RunError: no engine is left, and none starts in time.
        """
        async with task_group() as self._tasks:
            for slot, member in self._members.items():
                self._losses[member.id] = asyncio.get_running_loop().create_future()
                self._watch(slot, member)
            listener = self._tasks.create_task(self._listen())
            yield
            for task in (listener, *self._watches.values(), *filter(None, [self._change])):
                task.cancel()

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an optimizer step; at the end of a version an engine may be added or retired."""
        if self._elasticity is None or self._tasks is None:
            return
        if self._spare or len(self._members) < len(self._watches) or not (self._change is None or self._change.done()):
            self._elasticity.forget()
            return
        self._elasticity.step(metrics["time/step"], metrics["idle/trainer"], metrics["idle/rollouter"])
        change = self._elasticity.version(len(self._members)) if "time/sync" in metrics else 0
        if change:
            self._change = self._tasks.create_task(self._grow() if change > 0 else self._retire())

    def _watch(self, slot: EngineId, member: Member) -> None:
        assert self._tasks is not None
        self._watches[slot] = self._tasks.create_task(self._keep(slot, member))

    async def _grow(self) -> None:
        """Add a slot and its engine: an autoscaler answers a pending actor with a pod."""
        self._notice(f"the trainer waits for groups: one more engine is requested, {len(self._members)} are at work")
        slot = next(self._ids)
        try:
            member = await self._next_member(slot, slot)
        except (EngineError, StoreError) as error:
            self._notice(f"an additional engine did not start: {error}")
            return
        if member is not None:
            self._watch(slot, member)

    async def _retire(self) -> None:
        """End the engine that joined last; its pod has no actor then, and the autoscaler removes it."""
        slot, member = list(self._members.items())[-1]
        self._notice(f"generation waits for the trainer: {member.id} is retired, {len(self._members) - 1} are left")
        self._watches.pop(slot).cancel()
        self._forget(slot, member)
        try:
            await self._rotation.remove_engine(member.id, "engine_retired", self._limits.group_timeout_s)
        finally:
            await member.end()

    async def _listen(self) -> None:
        """Ask the rollouter for lost engines: it may fail to reach an engine that answers here."""
        while True:
            for engine_id, why in (await self._rotation.lost_engines()).items():
                self._report(engine_id, why)
            await asyncio.sleep(self._limits.probe_interval_s)

    def _report(self, engine_id: EngineId, why: str) -> None:
        loss = self._losses.get(engine_id)
        if loss is not None and not loss.done():
            loss.set_result(why)

    async def _keep(self, slot: EngineId, member: Member) -> None:
        while True:
            why = await self._until_lost(member)
            self._notice(f"{member.id} is lost and will be replaced; its groups are generated again. {why}")
            finished = await self._remove(slot, member)
            member = await self._replace(slot, why, finished)

    async def _until_lost(self, member: Member) -> str:
        loss = self._losses[member.id]
        probe = asyncio.create_task(self._probe(member))
        try:
            await asyncio.wait([probe, loss], return_when=asyncio.FIRST_COMPLETED)
            return loss.result() if loss.done() else probe.result()
        finally:
            probe.cancel()

    async def _probe(self, member: Member) -> str:
        limit = self._limits.probe_timeout_s
        while True:
            try:
                async with asyncio.timeout(limit):
                    await member.version()
            except EngineError as error:
                return str(error)
            except TimeoutError:
                return f"{member.id} did not answer within {limit:g} s: its process is stuck or stopped"
            await asyncio.sleep(self._limits.probe_interval_s)

    async def _remove(self, slot: EngineId, member: Member) -> int:
        """Take an engine out and end it; returns how many requests it had finished."""
        self._forget(slot, member)
        try:
            return await self._rotation.remove_engine(member.id, "engine_lost")
        finally:  # also when the run ends meanwhile, because the engine is not a member any more
            await member.end()

    async def _replace(self, slot: EngineId, why: str, finished: int) -> Member:
        """Start an engine in place of a lost one, and try again when it fails."""
        cause: TidemillError | None = None
        while (losses := self._crashes.lost(slot, finished)) < self._limits.losses:
            try:
                while (member := await self._next_member(slot, next(self._ids))) is None:
                    self._notice(f"another engine in place of {slot} is requested")
                return member
            except (EngineError, StoreError) as error:
                why, finished, cause = str(error), 0, error
                self._notice(f"an engine in place of {slot} did not start: {error}")
            await asyncio.sleep(self._limits.retry_s)
        text = f"{losses} engines in a row, each in place of the one before, died without finishing a group: {why}"
        raise EngineError(text) from cause

    async def _next_member(self, slot: EngineId, engine_id: EngineId) -> Member | None:
        """Start an engine and give it the newest version; None if the cluster has no room for it."""
        member = self._start(engine_id)
        try:
            if not await self._is_placed(member):
                return None
            self._losses[engine_id] = asyncio.get_running_loop().create_future()
            async with self._synchronizer.joining(engine_id, member):
                self._members[slot] = member
            await self._rotation.add_engine(engine_id, member)
        except asyncio.CancelledError:
            member.kill()
            raise
        except Exception:
            self._forget(slot, member)
            await member.end()
            raise
        self._notice(f"{engine_id} has joined with the newest version; engines at work: {len(self._members)}")
        return member

    def _forget(self, slot: EngineId, member: Member) -> None:
        self._members.pop(slot, None)
        self._losses.pop(member.id, None)

    async def _is_placed(self, member: Member) -> bool:
        """Wait until an engine has started; False if it does not in time and other engines are at work."""
        limit = self._limits.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await member.start()
        except TimeoutError as error:
            member.kill()
            late = f"{member.id} was not placed and loaded within {limit:g} s (rollout.start_timeout_s)"
            if not self._members:
                raise RunError(f"{late}, and no other engine is left") from error
            self._notice(f"{late}; the other engines go on")
            return False
        return True
