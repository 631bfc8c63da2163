"""The engines of a run: one that dies is replaced, and the new one catches up.

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
from tidemill.rollout.activity import Clock
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.sync.synchronizer import Synchronizer

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
        """This one gets no more; its groups that do not end in time are issued again. Returns how many it finished."""
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
    """Keeps as many engines as there are places; publishes versions to all of them.

    Args:
        members: the engines of the start, which have loaded.
        start: places an engine with this number; it loads when its `start` is called.
        start_timeout_s: for a new engine to have its place and to load.
        rotation: the rollouter.
        synchronizer: brings versions to the engines; has those of the start already.
        notice: tells a person.
        clock: monotonic seconds.
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
        clock: Clock = time.monotonic,
    ) -> None:
        self._start, self._start_timeout_s = start, start_timeout_s
        self._rotation, self._synchronizer, self._notice = rotation, synchronizer, notice
        self._members = {member.name: member for member in members}
        self._reports: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count(len(members))
        self._crashes = CrashLoop(clock)
        self._mode: PauseMode = "keep"

    @property
    def members(self) -> list[Member]:
        """The engines that are at work."""
        return list(self._members.values())

    async def publish(self, version: int, mode: PauseMode) -> Mapping[str, float]:
        """See `Synchronizer.publish`; engines that are lost on the way are replaced."""
        self._mode = mode
        metrics = await self._synchronizer.publish(version, mode)
        for name, error in self._synchronizer.take_lost().items():
            self._report(name, str(error))
        return metrics

    async def set_aside(self) -> str | None:
        """Take an engine out of rotation and publications, so that it keeps its version; None if it is the only one."""
        if len(self._members) < 2:
            return None
        name = list(self._members)[-1]
        self._synchronizer.leave(name)
        await self._rotation.set_engine_aside(name)
        return name

    async def take_back(self, name: str) -> None:
        """Give an engine that was set aside the newest version, and groups again; if it is lost, nothing."""
        try:
            if name in self._members:
                await self._synchronizer.late_join(name, self._members[name], self._mode)
                await self._rotation.take_engine_back(name)
        except (EngineError, StoreError) as error:
            self._report(name, str(error))

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Replace what is lost, for the time of the body.

        Raises:
            EngineError: the engines of a place die one after the other, see `CrashLoop`.
            RunError: no engine is left, and none comes up in time.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self.members:
                    self._enlist(member)
                keepers = [tasks.create_task(self._keep(member)) for member in self.members]
                keepers.append(tasks.create_task(self._listen()))
                yield
                for keeper in keepers:
                    keeper.cancel()
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__  # where a remote traceback stands

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

    async def _keep(self, member: Member) -> None:
        """Look after one place, named by its first engine, for as long as the run goes on."""
        place = member.name
        while True:
            why = await self._until_lost(member)
            self._notice(f"{member.name} is lost and will be replaced; its groups are generated again. {why}")
            finished = await self._remove(member)
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

    async def _remove(self, member: Member) -> int:
        """Take an engine out and end it; returns how many requests it had finished."""
        self._forget(member)
        finished = await self._rotation.remove_engine(member.name, "engine_lost")
        await member.end()
        return finished

    async def _replace(self, place: str, why: str, finished: int) -> Member:
        """Bring up an engine in place of one that is lost, however often that takes."""
        cause: TidemillError | None = None
        while (losses := self._crashes.lost(place, finished)) < LOSSES:
            try:
                return await self._next_member()
            except (EngineError, StoreError) as error:
                why, finished, cause = str(error), 0, error
                self._notice(f"an engine in place of {place} did not come up: {error}")
            await asyncio.sleep(RETRY_S)
        text = f"{losses} engines in a row, each in place of the one before, died without finishing a group: {why}"
        raise EngineError(text) from cause

    async def _next_member(self) -> Member:
        """Start an engine and let it catch up."""
        while True:
            member = self._start(next(self._numbers))
            try:
                if not await self._is_placed(member):
                    continue
                await self._join(member)
            except asyncio.CancelledError:
                member.kill()
                raise
            except Exception:
                self._forget(member)
                await member.end()
                raise
            self._notice(f"{member.name} has joined with the newest version; engines at work: {len(self._members)}")
            return member

    async def _join(self, member: Member) -> None:
        """The newest version first, then groups; what happens to it from here on is reported."""
        self._enlist(member)
        await self._synchronizer.late_join(member.name, member)
        self._members[member.name] = member
        await self._rotation.add_engine(member.name, member)

    def _forget(self, member: Member) -> None:
        self._members.pop(member.name, None)
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
            late = f"{member.name} found no place within {self._start_timeout_s:g} s (rollout.start_timeout_s)"
            if not self._members:
                raise RunError(f"{late}, and no other engine is left") from error
            self._notice(f"{late}; the others go on, and it is tried again")
            member.kill()
            return False
        return True
