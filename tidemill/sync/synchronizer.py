"""Publishes a version: export once, adopt everywhere, check that the engines compute what the trainer computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np

from tidemill.errors import ChainError, EngineError, RunError, SyncError, TidemillError
from tidemill.failure import PASSING
from tidemill.observe.timings import Timings
from tidemill.protocols import Engine, PauseMode, WeightUpdate
from tidemill.records import Float32Array, Int32Array
from tidemill.sections import SyncConfig
from tidemill.sync.outbox import Outbox

T = TypeVar("T")
Score = Callable[[Int32Array], Awaitable[Float32Array]]
WORST_TOKENS = 3
NOISE_FLOOR, NOISE_FACTOR = 0.01, 10.0
"""The first publication shows how far equal weights differ by rounding, in nats: nearly nothing in float32, some
hundredths in bfloat16. A gap beyond the floor and so many times that is not rounding."""
LOG = logging.getLogger(__name__)


class Synchronizer:
    """Brings weights from one trainer to all engines.

    Args:
        engines: all of them; those that join later come through `late_join`.
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
        self._engines = list(engines)
        self._config = config
        self._outbox = outbox
        self._score = score
        self._canary = canary
        self._newest: WeightUpdate | None = None
        self._reference: Float32Array | None = None
        self._bound = config.canary_max_gap
        self._turn = asyncio.Lock()  # a version is adopted by all engines there are, or by one that joins, never both

    async def publish(self, version: int, mode: PauseMode) -> Mapping[str, float]:
        """Bring the trainer's present weights to every engine as `version`.

        Generation goes on during the export. An engine that missed versions in between adopts this one all the same.

        Returns:
            `time/sync_export`, `time/sync_adopt`, `time/sync_canary` in seconds, `sync/bytes`, and
            `sync/canary_gap`, the widest mean gap of any engine; and what the transport adds.

        Raises:
            SyncError: no room, an engine that refused the weights, or a gap above the bound.
            EngineError: an engine died or did not answer before the deadline.
            RunError: an actor died, or the trainer did not answer before the deadline.
            StoreError: an engine could not reach the object store.
        """
        async with self._turn:
            return await self._publish(version, mode)

    async def _publish(self, version: int, mode: PauseMode) -> Mapping[str, float]:
        timings = Timings()
        with timings.phase("sync_export"):
            async with self._deadline(f"export version {version}"):
                publication = await self._outbox.write(version)
        with timings.phase("sync_adopt"):
            update = await self._adopt(publication.update, self._engines, mode, f"adopt version {version}")
        outdated, self._newest, self._reference = self._newest, update, None
        with timings.phase("sync_canary"):
            gap = await self._check_canary(self._engines)
        if outdated is None and self._bound is not None:
            self._bound = min(self._bound, NOISE_FLOOR + NOISE_FACTOR * gap)
        if outdated is not None and outdated.path != update.path:
            self._outbox.retire(outdated)
        facts = {"sync/bytes": float(update.nbytes), "sync/canary_gap": gap}
        return {**timings.metrics(), **facts, **publication.metrics}

    async def late_join(self, engine: Engine) -> None:
        """Give an engine that started, or started again, the newest version; later ones reach it too.

        A publication under way ends first, and one that comes meanwhile waits.

        Raises:
            SyncError, EngineError, RunError, StoreError: as in `publish`.
        """
        async with self._turn:
            if engine not in self._engines:
                self._engines.append(engine)
            if self._newest is not None:
                what = f"adopt version {self._newest.version} late"
                self._newest = await self._adopt(self._newest, [engine], "keep", what)
                await self._check_canary([engine])

    def close(self) -> None:
        """Free what the outbox holds; engines keep the weights they adopted."""
        self._outbox.close()

    async def _adopt(self, update: WeightUpdate, engines: Sequence[Engine], mode: PauseMode, what: str) -> WeightUpdate:
        """Have engines adopt a version; returns what they adopted: a snapshot where `update` had come to harm."""
        try:
            await self._all(engines, lambda engine: engine.update_weights(update, mode), what)
        except ChainError as error:
            LOG.warning("%s; publishing version %d as a snapshot", error, update.version)
        else:
            return update
        async with self._deadline(f"publish version {update.version} as a snapshot"):
            snapshot = (await self._outbox.snapshot()).update
        await self._all(engines, lambda engine: engine.update_weights(snapshot, mode), what)
        return snapshot

    async def _all(self, engines: Sequence[Engine], call: Callable[[Engine], Awaitable[T]], what: str) -> list[T]:
        """Call engines at once and let all of them end, so that none is left in the middle of an update."""
        calls = [self._answer(call(engine), what) for engine in engines]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers, failures = [], {}
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, BaseException):
                failures[f"engine {self._engines.index(engine)}"] = result
            else:
                answers.append(result)
        if failures:
            text = "; ".join(named(name, error) for name, error in failures.items())
            kind, cause = gravest(list(failures.values()))
            raise kind(f"{len(failures)} of {len(results)} engines did not {what}: {text}") from cause
        return answers

    async def _answer(self, call: Awaitable[T], what: str) -> T:
        """What an engine answers before the deadline."""
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as error:
            raise EngineError(f"could not {what} within sync.timeout_s = {limit} s") from error

    async def _check_canary(self, engines: Sequence[Engine]) -> float:
        """The widest mean gap of `engines`; 0 where the check is off."""
        if self._config.canary_max_gap is None or self._newest is None:
            return 0.0
        if self._reference is None:
            async with self._deadline("score the canary"):
                self._reference = await self._score(self._canary)
        scores = await self._all(engines, lambda engine: engine.score(self._canary), "score the canary")
        return max(
            self._gap(self._engines.index(engine), self._reference, score)
            for engine, score in zip(engines, scores, strict=True)
        )

    def _gap(self, index: int, reference: Float32Array, score: Float32Array) -> float:
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
                f"engine {index} computes something else than the trainer: after the sync their log-probs differ by "
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
    for kind in (*PASSING, ChainError):
        for error in errors:
            if isinstance(error, kind):
                return kind, error
    return SyncError, errors[0]


def named(engine: str, error: BaseException) -> str:
    """The text of an error behind the name of its engine; that of an actor that died has it already."""
    return str(error) if str(error).startswith(engine) else f"{engine}: {error}"
