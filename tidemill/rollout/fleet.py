"""The engines of a run: one that dies is replaced, the new one catches up, and their number follows the load.

Each place for an engine has a keeper, a task that watches the engine there. An engine is lost when it does not answer a
probe, when the rollouter cannot reach it, or when it drops out of a publication. Then it is taken out of the rotation,
which issues its groups again, and its process is ended; the next one starts, gets the newest version from the
`Synchronizer` and only then its first group. Meanwhile the others go on. On a cluster the new engine waits for its pod.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from tidemill.errors import EngineError, RunError, StoreError, TidemillError
from tidemill.protocols import Engine, PauseMode
from tidemill.rollout.elasticity import Elasticity
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.task_group import task_group
from tidemill.weights.synchronizer import Synchronizer

PROBE_S = 2.0  # between two looks at an engine
PROBE_TIMEOUT_S = 60.0  # an engine that does not answer by then is stuck
RETRY_S = 5.0  # after an engine that did not come up


class Member(Engine, Protocol):
    """An engine of the fleet: `actors.engine.RemoteEngine`."""

    @property
    def name(self) -> str:
        """Unique in a run, also over replacements."""
        ...

    async def start(self) -> None:
        """Wait until it has its place and has loaded its model.

        Raises:
            EngineError: it could not.
        """
        ...

    async def end(self) -> None:
        """End the process, in order where it still answers."""
        ...

    def kill(self) -> None:
        """End the process at once, also one that has no place yet."""
        ...


class Rotation(Protocol):
    """Who sends groups to the engines: `actors.rollouter.RemoteGeneration`."""

    async def add_engine(self, name: str, engine: Member) -> None:
        """This engine has the newest version and takes groups."""
        ...

    async def remove_engine(self, name: str, reason: str, patience_s: float = 0.0) -> int:
        """This one gets no more; its groups that do not end in time are issued again.

        Returns how many it finished, and how many prompts were set aside because they killed it.
        """
        ...

    async def set_engine_aside(self, name: str) -> None:
        """This one gets no more groups, and finishes those that it has; only an evaluation may name it."""
        ...

    async def take_engine_back(self, name: str) -> None:
        """It gets groups again; nothing if it has been removed."""
        ...

    async def lost_engines(self) -> Mapping[str, str]:
        """Engines that cannot be reached from there, and why."""
        ...


class Fleet:
    """Keeps an engine at every place; publishes versions to all of them.

    A place has the name of its first engine.

    Args:
        members: the engines of the start, which have loaded.
        start: places an engine with this number; it loads when its `start` is called.
        start_timeout_s: for a new engine to have its place and to load.
        rotation: the rollouter.
        synchronizer: brings versions to the engines; has those of the start already.
        notice: tells a person.
        elasticity: says when an engine is added or retired; None keeps their number.
        group_timeout_s: for an engine that is retired to finish what it has.
    """

    def __init__(
        self,
        members: Sequence[Member],
        start: Callable[[int], Member],
        start_timeout_s: float,
        rotation: Rotation,
        synchronizer: Synchronizer,
        notice: Callable[[str], None],
        *,
        elasticity: Elasticity | None = None,
        group_timeout_s: float = 600.0,
    ) -> None:
        self._start, self._start_timeout_s, self._group_timeout_s = start, start_timeout_s, group_timeout_s
        self._rotation, self._synchronizer, self._notice = rotation, synchronizer, notice
        self._elasticity = elasticity
        self._members = {member.name: member for member in members}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count(len(members))
        self._crashes = CrashLoop(time.monotonic)
        self._mode: PauseMode = "keep"
        self._aside: str | None = None
        self._change: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def members(self) -> list[Member]:
        """The engines that are at work."""
        return list(self._members.values())

    async def publish(
        self, version: int, mode: PauseMode, exported: Callable[[], None] = lambda: None
    ) -> Mapping[str, float]:
        """See `Synchronizer.publish`; engines that are lost on the way are replaced."""
        self._mode = mode
        metrics = await self._synchronizer.publish(version, mode, exported)
        for name, error in self._synchronizer.take_lost().items():
            self._report(name, str(error))
        return metrics

    async def set_aside(self) -> str | None:
        """Take an engine out of rotation and publications, so that it keeps its version; None if it is the only one."""
        if len(self._members) < 2:
            return None
        self._aside = self.members[-1].name
        self._synchronizer.leave(self._aside)
        await self._rotation.set_engine_aside(self._aside)
        return self._aside

    async def take_back(self, name: str) -> None:
        """Give an engine that was set aside the newest version, and groups again; if it is lost, nothing."""
        self._aside = None
        for member in self.members:
            if member.name == name:
                try:
                    await self._synchronizer.late_join(name, member, self._mode)
                except (EngineError, StoreError) as error:
                    self._report(name, str(error))
                else:
                    await self._rotation.take_engine_back(name)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Replace what is lost, for the time of the body.

        Raises:
            EngineError: the engines of a place die one after the other, see `CrashLoop`.
            RunError: no engine is left, and none comes up in time.
        """
        async with task_group() as self._tasks:
            for place, member in self._members.items():
                self._enlist(member)
                self._occupy(place, member)
            listener = self._tasks.create_task(self._listen())
            yield
            for task in (listener, *self._keepers.values(), *filter(None, [self._change])):
                task.cancel()

    def measured(self, metrics: Mapping[str, float]) -> None:
        """An optimizer step is done; at the end of its version an engine may be added or retired."""
        if self._elasticity is None or self._tasks is None:
            return
        if self._aside or len(self._members) < len(self._keepers) or not (self._change is None or self._change.done()):
            self._elasticity.forget()
            return
        self._elasticity.step(metrics["time/step"], metrics["idle/trainer"], metrics["idle/rollouter"])
        change = self._elasticity.version(len(self._members)) if "time/sync" in metrics else 0
        if change:
            self._change = self._tasks.create_task(self._grow() if change > 0 else self._retire())

    def _occupy(self, place: str, member: Member) -> None:
        assert self._tasks is not None
        self._keepers[place] = self._tasks.create_task(self._keep(place, member))

    async def _grow(self) -> None:
        """One place more, and its engine: a pending actor is what an autoscaler answers with a pod."""
        self._notice(f"the trainer waits for groups: an engine is asked for beside the {len(self._members)}")
        number = next(self._numbers)
        place = f"engine {number}"
        try:
            member = await self._next_member(place, number)
        except (EngineError, StoreError) as error:
            self._notice(f"an additional engine did not come up: {error}")
            return
        if member is not None:
            self._occupy(place, member)

    async def _retire(self) -> None:
        """End the engine of the newest place; its pod, left without an actor, is taken by the autoscaler."""
        place, member = list(self._members.items())[-1]
        self._notice(f"generation waits for the trainer: {member.name} is retired, {len(self._members) - 1} are left")
        self._keepers.pop(place).cancel()
        self._forget(place, member)
        try:
            await self._rotation.remove_engine(member.name, "engine_retired", self._group_timeout_s)
        finally:
            await member.end()

    async def _listen(self) -> None:
        """Hear from the rollouter, which may not reach an engine that answers here."""
        while True:
            for name, why in (await self._rotation.lost_engines()).items():
                self._report(name, why)
            await asyncio.sleep(PROBE_S)

    def _enlist(self, member: Member) -> None:
        self._reports[member.name] = asyncio.get_running_loop().create_future()

    def _report(self, name: str, why: str) -> None:
        report = self._reports.get(name)
        if report is not None and not report.done():
            report.set_result(why)

    async def _keep(self, place: str, member: Member) -> None:
        """Look after one place for as long as the run goes on."""
        while True:
            why = await self._until_lost(member)
            self._notice(f"{member.name} is lost and will be replaced; its groups are generated again. {why}")
            finished = await self._remove(place, member)
            member = await self._replace(place, why, finished)

    async def _until_lost(self, member: Member) -> str:
        """Watch an engine; returns why it is of no use any more."""
        report = self._reports[member.name]
        probe = asyncio.create_task(self._probe(member))
        try:
            await asyncio.wait([probe, report], return_when=asyncio.FIRST_COMPLETED)
            return report.result() if report.done() else probe.result()
        finally:
            probe.cancel()

    async def _probe(self, member: Member) -> str:
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await member.version()
            except EngineError as error:
                return str(error)
            except TimeoutError:
                return f"{member.name} did not answer within {PROBE_TIMEOUT_S:g} s: its process is stuck or stopped"
            await asyncio.sleep(PROBE_S)

    async def _remove(self, place: str, member: Member) -> int:
        """Take an engine out and end it; returns how many requests it had finished."""
        self._forget(place, member)
        try:
            return await self._rotation.remove_engine(member.name, "engine_lost")
        finally:  # also where the run ends meanwhile, which knows it as a member no more
            await member.end()

    async def _replace(self, place: str, why: str, finished: int) -> Member:
        """Bring up an engine in place of one that is lost, however often that takes."""
        cause: TidemillError | None = None
        while (losses := self._crashes.lost(place, finished)) < LOSSES:
            try:
                while (member := await self._next_member(place, next(self._numbers))) is None:
                    self._notice(f"an engine in place of {place} is asked for again")
                return member
            except (EngineError, StoreError) as error:
                why, finished, cause = str(error), 0, error
                self._notice(f"an engine in place of {place} did not come up: {error}")
            await asyncio.sleep(RETRY_S)
        text = f"{losses} engines in a row, each in place of the one before, died without finishing a group: {why}"
        raise EngineError(text) from cause

    async def _next_member(self, place: str, number: int) -> Member | None:
        """Start an engine and let it catch up; None if the cluster has no room for it."""
        member = self._start(number)
        try:
            if not await self._is_placed(member):
                return None
            self._enlist(member)
            await self._synchronizer.late_join(member.name, member)
            self._members[place] = member
            await self._rotation.add_engine(member.name, member)
        except asyncio.CancelledError:
            member.kill()
            raise
        except Exception:
            self._forget(place, member)
            await member.end()
            raise
        self._notice(f"{member.name} has joined with the newest version; engines at work: {len(self._members)}")
        return member

    def _forget(self, place: str, member: Member) -> None:
        self._members.pop(place, None)
        self._reports.pop(member.name, None)
        self._synchronizer.leave(member.name)

    async def _is_placed(self, member: Member) -> bool:
        """Wait until an engine can be used; False if it is not in time and others are at work.

        Raises:
            RunError: it is not in time, and no engine is left.
            EngineError: it failed.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await member.start()
        except TimeoutError as error:
            member.kill()
            late = f"{member.name} found no place within {self._start_timeout_s:g} s (rollout.start_timeout_s)"
            if not self._members:
                raise RunError(f"{late}, and no other engine is left") from error
            self._notice(f"{late}; the others go on")
            return False
        return True
