"""Publishes a version: export once, adopt everywhere, check that the engines compute what the trainer computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
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
from tidemill.records import Float32Array, Int32Array
from tidemill.weights.outbox import Outbox, Publication

T = TypeVar("T")
Score = Callable[[Int32Array], Awaitable[Float32Array]]
WORST_TOKENS = 3
NOISE_FLOOR, NOISE_FACTOR = 0.01, 10.0
"""The first publication shows how far equal weights differ by rounding, in nats: nearly nothing in float32, some
hundredths in bfloat16. A gap beyond the floor and so many times that is not rounding."""
LOG = logging.getLogger(__name__)


class Synchronizer:
    """Brings weights from one trainer to all engines.

    An engine that dies or does not answer in time fails no publication: the others adopt the version, and it is left
    out from then on. `take_lost` tells of it, so that another engine can take its place.

    Args:
        engines: those of the start, named "engine 0", "engine 1", ...; others come through `late_join`.
        config: deadline and canary.
        outbox: where the trainer puts a version; closed by `close`.
        score: `[T-1]` natural log-probs of `tokens[1:]` under the trainer's weights at temperature 1.
        canary: `[T]` int32, the tokens that trainer and engines must agree on.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SyncConfig,
        outbox: Outbox,
        score: Score,
        canary: Int32Array,
    ) -> None:
        self._engines = {f"engine {n}": engine for n, engine in enumerate(engines)}
        self._lost: dict[str, EngineLostError] = {}
        self._calibrated = False
        self._config = config
        self._outbox = outbox
        self._score = score
        self._canary = canary
        self._newest: Publication | None = None
        self._reference: Float32Array | None = None
        self._bound = config.canary_max_gap
        self._joined_gap = 0.0  # the widest of engines that came since the last publication
        self._turn = asyncio.Lock()  # a version is adopted by all engines there are, or by one that joins, never both

    async def publish(
        self, version: int, mode: PauseMode, exported: Callable[[], None] = lambda: None
    ) -> Mapping[str, float]:
        """Bring the trainer's present weights to every engine as `version`.

        Generation goes on during the export, and training during the adoption: `exported` is called as soon as the
        trainer's weights may change. An engine that missed versions in between adopts this one all the same.

        Returns:
            `time/sync_export`, `time/sync_adopt`, `time/sync_canary` in seconds, `sync/bytes`, and
            `sync/canary_gap`, the widest mean gap of any engine, those that joined since the last publication included,
            unless the check is off; and what the transport adds.

        Raises:
            SyncError: no room, an engine that refused the weights, or a gap above the bound.
            EngineError: an engine failed otherwise than by dying.
            RunError: the trainer died, or did not answer before the deadline.
            StoreError: the trainer or an engine could not reach the object store.
        """
        async with self._turn:
            return await self._publish(version, mode, exported)

    async def _publish(self, version: int, mode: PauseMode, exported: Callable[[], None]) -> Mapping[str, float]:
        timings = Timings()
        with timings.phase("sync_export"):
            async with self._deadline(f"export version {version}"):
                await self._outbox.export()
        with timings.phase("sync_canary"):
            reference = await self._score_canary()
        exported()
        async with self._deadline(f"publish version {version}"):
            publication = await self._outbox.send(version)
        with timings.phase("sync_adopt"):
            publication = await self._adopt(publication, self._engines, mode, f"adopt version {version}")
        update = publication.update
        outdated, self._newest, self._reference = self._newest, publication, reference
        with timings.phase("sync_canary"):
            gap = await self._check_canary(self._engines)
        if not self._calibrated and self._bound is not None and self._engines:
            self._bound, self._calibrated = min(self._bound, NOISE_FLOOR + NOISE_FACTOR * gap), True
        if outdated is not None and outdated.update.path != update.path:
            self._outbox.retire(outdated.update)
        widest, self._joined_gap = max(gap, self._joined_gap), 0.0
        facts = {"sync/bytes": float(update.nbytes)} | ({} if self._bound is None else {"sync/canary_gap": widest})
        return {**timings.metrics(), **facts, **publication.metrics}

    async def late_join(self, name: str, engine: Engine, mode: PauseMode = "keep") -> None:
        """Give an engine that started, or was left out for a time, the newest version; later ones reach it too.

        A publication under way ends first, and one that comes meanwhile waits.

        Raises:
            EngineLostError: it died, or did not answer in time; it has not joined.
            SyncError, EngineError, RunError, StoreError: as in `publish`.
        """
        async with self._turn:
            joining = {name: engine}
            if self._newest is not None:
                what = f"adopt version {self._newest.update.version} late"
                self._newest = await self._adopt(self._newest, joining, mode, what)
                self._joined_gap = max(self._joined_gap, await self._check_canary(joining))
            if name in self._lost:
                raise self._lost.pop(name)
            self._engines[name] = engine

    def leave(self, name: str) -> None:
        """Publish no more to this engine."""
        self._engines.pop(name, None)

    def take_lost(self) -> Mapping[str, EngineLostError]:
        """Engines that were lost in a publication since the last call, and why."""
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """Free what the outbox holds; engines keep the weights they adopted."""
        self._outbox.close()

    async def _adopt(
        self, publication: Publication, engines: dict[str, Engine], mode: PauseMode, what: str
    ) -> Publication:
        """Have engines adopt a version; returns what they adopted.

        That is a snapshot, as a second try, where the first had come to harm in the store, or could not be read.
        """
        update = publication.update
        try:
            await self._all(engines, lambda engine: engine.update_weights(update, mode), what)
        except (ChainError, StoreError) as error:
            LOG.warning("%s; publishing version %d as a snapshot", error, update.version)
        else:
            return publication
        async with self._deadline(f"publish version {update.version} as a snapshot"):
            snapshot = await self._outbox.snapshot()
        await self._all(engines, lambda engine: engine.update_weights(snapshot.update, mode), what)
        return snapshot

    async def _all(self, engines: dict[str, Engine], call: Callable[[Engine], Awaitable[T]], what: str) -> dict[str, T]:
        """Call engines at once and let all of them end, so that none is left in the middle of an update.

        Those that are lost on the way leave `engines`; the answers are those of the others. One that `leave` took out
        meanwhile fails nobody: it is being ended, in the middle of whatever it was asked.
        """
        asked = dict(engines)
        calls = [self._answer(partial(call, engine), what) for engine in asked.values()]
        results = dict(zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        answers: dict[str, T] = {}
        failures: dict[str, BaseException] = {}
        for name, result in results.items():
            if isinstance(result, EngineLostError):
                LOG.warning("%s is left out, because it did not %s: %s", name, what, result)
                engines.pop(name, None)
                self._lost[name] = result
            elif not isinstance(result, BaseException):
                answers[name] = result
            elif name in engines:
                failures[name] = result
            else:
                LOG.warning("%s is at work no more and did not %s: %r", name, what, result)
        if failures:
            text = "; ".join(named(name, error) for name, error in failures.items())
            kind, cause = gravest(list(failures.values()))
            raise kind(f"{len(failures)} of {len(results)} engines did not {what}: {text}") from cause
        return answers

    async def _answer(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """What an engine answers before the deadline."""
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await call()
        except TimeoutError as error:
            raise EngineLostError(f"could not {what} within sync.timeout_s = {limit} s") from error

    async def _score_canary(self) -> Float32Array | None:
        """What the trainer's present weights say, also without an engine: when one joins, the trainer has learned."""
        if self._config.canary_max_gap is None:
            return None
        async with self._deadline("score the canary"):
            return await self._score(self._canary)

    async def _check_canary(self, engines: dict[str, Engine]) -> float:
        """The widest mean gap of `engines` to the newest version; 0 where the check is off, or there are none."""
        reference = self._reference
        if reference is None:
            return 0.0
        scores = await self._all(engines, lambda engine: engine.score(self._canary), "score the canary")
        return max((self._gap(name, reference, score) for name, score in scores.items()), default=0.0)

    def _gap(self, name: str, reference: Float32Array, score: Float32Array) -> float:
        gaps = np.abs(reference - score)
        gap, bound = float(gaps.mean()), self._bound
        # Written so that NaN fails too.
        if bound is not None and not gap <= bound:
            worst = np.argsort(-np.nan_to_num(gaps, nan=np.inf))[:WORST_TOKENS]
            tokens = ", ".join(
                f"token {self._canary[i + 1]} at {i + 1}: trainer {reference[i]:.3f}, engine {score[i]:.3f}"
                for i in worst
            )
            raise SyncError(
                f"{name} computes something else than the trainer: after the sync their log-probs differ by "
                f"{gap:.4f} in the mean, allowed is {bound:.4f} (sync.canary_max_gap is {self._config.canary_max_gap}, "
                f"and less where rounding is finer); {tokens}"
            )
        return gap

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        """Of the trainer."""
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError as error:
            raise RunError(f"the trainer could not {what} within sync.timeout_s = {limit} s") from error


def gravest(errors: Sequence[BaseException]) -> tuple[type[TidemillError], BaseException]:
    """What to raise for failures of engines, and for which: what another try may mend comes first, as it is."""
    for kind in (*RETRYABLE, ChainError):
        for error in errors:
            if isinstance(error, kind) and (kind is ChainError or is_retryable(error)):
                return kind, error
    return SyncError, errors[0]


def named(engine: str, error: BaseException) -> str:
    """The text of an error behind the name of its engine; that of an actor that died has it already."""
    return str(error) if str(error).startswith(engine) else f"{engine}: {error}"
