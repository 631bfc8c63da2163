"""Publishes a version: export once, adopt everywhere, check that the engines compute what the trainer computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from tidemill.config.asynchrony import SyncConfig
from tidemill.errors import (
    RETRYABLE,
    ChainError,
    EngineLostError,
    RunError,
    StoreError,
    SyncError,
    TidemillError,
    is_retryable,
)
from tidemill.observe.meters import Timings
from tidemill.protocols import Engine, PauseMode
from tidemill.records import EngineId, Float32Array, Int32Array
from tidemill.weights.transport import Publication, Transport, WeightSource

T = TypeVar("T")
WORST_TOKENS = 3
NOISE_FLOOR, NOISE_FACTOR = 0.01, 10.0
"""The first publication shows how far equal weights differ by rounding, in nats: nearly nothing in float32, some
hundredths in bfloat16. A gap beyond the floor and so many times that is not rounding."""
LOG = logging.getLogger(__name__)


Engines = Callable[[], Mapping[EngineId, Engine]]
"""The engines that take versions at the moment. They are read again at each step, because the fleet changes them."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of a publication."""

    metrics: Mapping[str, float]
    lost: Mapping[EngineId, EngineLostError]


@dataclass(slots=True)
class Recipients:
    """The engines that one publication reaches."""

    members: Engines
    timeout_s: float
    lost: dict[EngineId, EngineLostError] = field(default_factory=dict)  # in an earlier step; later ones skip them

    async def call(self, method: Callable[[Engine], Awaitable[T]], what: str) -> dict[EngineId, T]:
        """Call all engines at once and let every call end, so that no engine is left in the middle of an update.

        Returns:
            The answers of the engines that are not lost. The failure of an engine that the fleet has removed meanwhile
            does not count, because its process is being ended.

        Raises:
            TidemillError: an engine failed in another way; see `most_severe`.
        """
        asked = {engine_id: engine for engine_id, engine in self.members().items() if engine_id not in self.lost}
        calls = [self._answer(partial(method, engine), what) for engine in asked.values()]
        results = dict(zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        answers: dict[EngineId, T] = {}
        failures: dict[EngineId, BaseException] = {}
        members = self.members()
        for engine_id, result in results.items():
            if isinstance(result, EngineLostError):
                LOG.warning("%s is left out, because it did not %s: %s", engine_id, what, result)
                self.lost[engine_id] = result
            elif not isinstance(result, BaseException):
                answers[engine_id] = result
            elif engine_id in members:
                failures[engine_id] = result
            else:
                LOG.warning("%s has left the run and did not %s: %r", engine_id, what, result)
        if failures:
            text = "; ".join(with_name(engine_id, error) for engine_id, error in failures.items())
            kind, cause = most_severe(list(failures.values()))
            raise kind(f"{len(failures)} of {len(results)} engines did not {what}: {text}") from cause
        return answers

    async def _answer(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call()
        except TimeoutError as error:
            raise EngineLostError(f"could not {what} within sync.timeout_s = {self.timeout_s} s") from error


class Synchronizer:
    """Brings weights from one trainer to the engines of a fleet, which owns the membership.

    An engine that dies or does not answer in time does not fail a publication: the others adopt the version, and the
    publication reports the loss to the fleet.

    Args:
        config: deadline and canary.
        transport: of a version; closed by `close`.
        source: the trainer, which scores the canary.
        canary: `[T]` int32, the tokens that trainer and engines must agree on.
    """

    def __init__(self, config: SyncConfig, transport: Transport, source: WeightSource, canary: Int32Array) -> None:
        self._config, self._transport, self._source, self._canary = config, transport, source, canary
        self._newest: Publication | None = None
        self._reference: Float32Array | None = None
        self._bound, self._calibrated = config.canary_max_gap, False
        self._joined_gap = 0.0  # the widest of engines that joined since the last publication
        self._turn = asyncio.Lock()  # held while the members adopt a version, or while one engine joins them

    async def publish(
        self, engines: Engines, version: int, mode: PauseMode, exported: Callable[[], None] = lambda: None
    ) -> Adopted:
        """Bring the trainer's present weights to every engine as `version`.

        Generation goes on during the export, and training during the adoption: `exported` is called as soon as the
        trainer's weights may change. An engine that missed versions in between adopts this one all the same.

        Returns:
            The lost engines, and as metrics `time/sync_export`, `time/sync_adopt`, `time/sync_canary` in seconds,
            `sync/bytes`, those of the transport and, unless the check is off, `sync/canary_gap`: the widest mean gap
            of any engine, including engines that joined since the last publication.

        Raises:
            SyncError: no room, an engine that refused the weights, or a gap above the bound.
            EngineError: an engine failed otherwise than by dying.
            RunError: the trainer died, or did not answer before the deadline.
            StoreError: the trainer or an engine could not reach the object store.
        """
        async with self._turn:
            recipients = Recipients(engines, self._config.timeout_s)
            return Adopted(await self._publish(recipients, version, mode, exported), recipients.lost)

    async def _publish(
        self, recipients: Recipients, version: int, mode: PauseMode, exported: Callable[[], None]
    ) -> Mapping[str, float]:
        timings = Timings()
        with timings.phase("sync_export"):
            async with self._deadline(f"export version {version}"):
                await self._transport.export()
        with timings.phase("sync_canary"):
            reference = await self._score_canary()
        exported()
        async with self._deadline(f"publish version {version}"):
            publication = await self._transport.send(version)
        with timings.phase("sync_adopt"):
            publication = await self._adopt(publication, recipients, mode, f"adopt version {version}")
        update = publication.update
        outdated, self._newest, self._reference = self._newest, publication, reference
        with timings.phase("sync_canary"):
            gaps = await self._canary_gaps(recipients)
        gap = max(gaps, default=0.0)
        if gaps and self._bound is not None and not self._calibrated:
            self._bound, self._calibrated = min(self._bound, NOISE_FLOOR + NOISE_FACTOR * gap), True
        if outdated is not None and outdated.update.path != update.path:
            self._transport.release(outdated.update)
        widest, self._joined_gap = max(gap, self._joined_gap), 0.0
        facts = {"sync/bytes": float(update.nbytes)} | ({} if self._bound is None else {"sync/canary_gap": widest})
        return {**timings.metrics(), **facts, **publication.metrics}

    @asynccontextmanager
    async def joining(self, engine_id: EngineId, engine: Engine, mode: PauseMode = "keep") -> AsyncIterator[None]:
        """Give an engine the newest version; the body makes it a member, so that it gets the later ones too.

        A publication under way ends first, and the next one waits for the end of the body.

        Raises:
            EngineLostError: it died, or did not answer in time; the body does not run.
            SyncError, EngineError, RunError, StoreError: as in `publish`.
        """
        async with self._turn:
            if self._newest is not None:
                recipients = Recipients(lambda: {engine_id: engine}, self._config.timeout_s)
                what = f"adopt version {self._newest.update.version} late"
                self._newest = await self._adopt(self._newest, recipients, mode, what)
                self._joined_gap = max([self._joined_gap, *await self._canary_gaps(recipients)])
                if recipients.lost:
                    raise recipients.lost[engine_id]
            yield

    def close(self) -> None:
        self._transport.close()

    async def _adopt(self, publication: Publication, recipients: Recipients, mode: PauseMode, what: str) -> Publication:
        """Have engines adopt a version; returns what they adopted.

        Where the stored version is damaged or cannot be read, it is published once more, as a snapshot.
        """
        update = publication.update
        try:
            await recipients.call(lambda engine: engine.update_weights(update, mode), what)
        except (ChainError, StoreError) as error:
            LOG.warning("%s; publishing version %d as a snapshot", error, update.version)
        else:
            return publication
        async with self._deadline(f"publish version {update.version} as a snapshot"):
            snapshot = await self._transport.snapshot()
        await recipients.call(lambda engine: engine.update_weights(snapshot.update, mode), what)
        return snapshot

    async def _score_canary(self) -> Float32Array | None:
        """Score the canary with the trainer's weights; without engines too, for one that joins later."""
        if self._config.canary_max_gap is None:
            return None
        async with self._deadline("score the canary"):
            return await self._source.score(self._canary)

    async def _canary_gaps(self, recipients: Recipients) -> list[float]:
        """The mean gap of each engine to the trainer's weights of the newest version; none where the check is off."""
        reference = self._reference
        if reference is None:
            return []
        scores = await recipients.call(lambda engine: engine.score(self._canary), "score the canary")
        return [self._gap(engine_id, reference, score) for engine_id, score in scores.items()]

    def _gap(self, engine_id: EngineId, reference: Float32Array, score: Float32Array) -> float:
        gaps = np.abs(reference - score)
        gap, bound = float(gaps.mean()), self._bound
        if bound is not None and not gap <= bound:  # NaN fails too
            worst = np.argsort(-np.nan_to_num(gaps, nan=np.inf))[:WORST_TOKENS]
            tokens = ", ".join(
                f"token {self._canary[i + 1]} at {i + 1}: trainer {reference[i]:.3f}, engine {score[i]:.3f}"
                for i in worst
            )
            raise SyncError(
                f"{engine_id} computes other log-probs than the trainer: after the sync they differ by "
                f"{gap:.4f} in the mean, allowed is {bound:.4f} (sync.canary_max_gap is {self._config.canary_max_gap}, "
                f"and less where rounding is finer); {tokens}"
            )
        return gap

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError as error:
            raise RunError(f"the trainer could not {what} within sync.timeout_s = {limit} s") from error


def most_severe(errors: Sequence[BaseException]) -> tuple[type[TidemillError], BaseException]:
    """The error to raise for several failures, and its cause: first those that another try may fix."""
    for kind in (*RETRYABLE, ChainError):
        for error in errors:
            if isinstance(error, kind) and (kind is ChainError or is_retryable(error)):
                return kind, error
    return SyncError, errors[0]


def with_name(engine_id: EngineId, error: BaseException) -> str:
    """The text of an error with the name of its engine; an actor that died names itself."""
    return str(error) if str(error).startswith(str(engine_id)) else f"{engine_id}: {error}"
