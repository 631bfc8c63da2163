"""Publishes a version: export once, adopt everywhere, check that the engines compute what the trainer computes."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tidemill.config import SyncConfig
from tidemill.errors import SyncError
from tidemill.observe.timings import Timings
from tidemill.protocols import Engine, PauseMode, WeightUpdate
from tidemill.records import Float32Array, Int32Array

Export = Callable[[Path], Awaitable[int]]
Score = Callable[[Int32Array], Awaitable[Float32Array]]
WORST_TOKENS = 3
NOISE_FLOOR, NOISE_FACTOR = 0.01, 10.0
"""The first publication shows how far equal weights differ by rounding, in nats: nearly nothing in float32, some
hundredths in bfloat16. A gap beyond the floor and so many times that is not rounding."""


class Synchronizer:
    """Brings weights from one trainer to engines of the same host.

    Args:
        engines: all of them; those that join later come through `late_join`.
        config: deadline and canary.
        folder: of its own, on a memory-backed file system; made here, removed by `close`.
        export: writes the trainer's weights to a safetensors file and returns its size in bytes.
        score: `[T-1]` natural log-probs of `tokens[1:]` under the trainer's weights at temperature 1.
        canary: `[T]` int32, the tokens that trainer and engines must agree on.
        expected_nbytes: size of an export, so that room is checked before the first one too.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SyncConfig,
        folder: Path,
        export: Export,
        score: Score,
        canary: Int32Array,
        expected_nbytes: int = 0,
    ) -> None:
        self._engines = list(engines)
        self._config = config
        self._folder = folder
        self._export = export
        self._score = score
        self._canary = canary
        self._nbytes = expected_nbytes
        self._newest: WeightUpdate | None = None
        self._reference: Float32Array | None = None
        self._bound = config.canary_max_gap
        # A run that was killed may have left its files here.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    async def publish(self, version: int, mode: PauseMode) -> Mapping[str, float]:
        """Bring the trainer's present weights to every engine as `version`.

        Generation goes on during the export. An engine that missed versions in between adopts this one all the same.

        Returns:
            `time/sync_export`, `time/sync_adopt`, `time/sync_canary` in seconds, `sync/bytes`, and
            `sync/canary_gap`, the widest mean gap of any engine.

        Raises:
            SyncError: no room, no answer before the deadline, an engine that refused, or a gap above the bound.
        """
        timings = Timings()
        with timings.phase("sync_export"):
            update = await self._write(version)
        with timings.phase("sync_adopt"):
            await self._all(lambda engine: engine.update_weights(update, mode), f"adopt version {version}")
        outdated, self._newest, self._reference = self._newest, update, None
        with timings.phase("sync_canary"):
            gap = await self._check_canary(self._engines)
        if outdated is None and self._bound is not None:
            self._bound = min(self._bound, NOISE_FLOOR + NOISE_FACTOR * gap)
        if outdated is not None and outdated.path != update.path:
            Path(outdated.path).unlink()
        return timings.metrics() | {"sync/bytes": float(update.nbytes), "sync/canary_gap": gap}

    async def late_join(self, engine: Engine) -> None:
        """Give an engine that started, or started again, the newest version; later ones reach it too.

        Raises:
            SyncError: as in `publish`.
        """
        if engine not in self._engines:
            self._engines.append(engine)
        if self._newest is not None:
            update = self._newest
            async with self._deadline(f"adopt version {update.version} late"):
                await engine.update_weights(update, "keep")
            await self._check_canary([engine])

    def close(self) -> None:
        """Free the memory; engines keep the weights they adopted."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _write(self, version: int) -> WeightUpdate:
        self._check_room()
        path = self._folder / f"v{version}.safetensors"
        try:
            async with self._deadline(f"export version {version}"):
                self._nbytes = await self._export(path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._no_room() from error
        if not path.is_file() or path.stat().st_size != self._nbytes:
            raise SyncError(f"the export of version {version} announced {self._nbytes} bytes and left another {path}")
        return WeightUpdate(version, str(path), self._nbytes)

    def _check_room(self) -> None:
        if shutil.disk_usage(self._folder).free < self._nbytes:
            raise self._no_room()

    def _no_room(self) -> SyncError:
        free = shutil.disk_usage(self._folder).free
        return SyncError(
            f"no room for the weights in {self._folder}: {self._nbytes or 'an unknown number of'} bytes needed, "
            f"{free} free. Old and new weights lie there together for a moment; enlarge /dev/shm (in a pod: a memory "
            "emptyDir on /dev/shm)"
        )

    async def _all(self, call: Callable[[Engine], Awaitable[None]], what: str) -> None:
        """Call every engine at once and let all of them end, so that none is left in the middle of an update."""
        async with self._deadline(what):
            results = await asyncio.gather(*(call(engine) for engine in self._engines), return_exceptions=True)
        failures = [(i, result) for i, result in enumerate(results) if isinstance(result, BaseException)]
        if failures:
            text = "; ".join(f"engine {index}: {error}" for index, error in failures)
            raise SyncError(f"{len(failures)} of {len(results)} engines did not {what}: {text}") from failures[0][1]

    async def _check_canary(self, engines: Sequence[Engine]) -> float:
        """The widest mean gap of `engines`; 0 where the check is off."""
        if self._config.canary_max_gap is None or self._newest is None:
            return 0.0
        async with self._deadline("score the canary"):
            if self._reference is None:
                self._reference = await self._score(self._canary)
            scores = await asyncio.gather(*(engine.score(self._canary) for engine in engines))
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
        try:
            async with asyncio.timeout(self._config.timeout_s):
                yield
        except TimeoutError as error:
            raise SyncError(f"could not {what} within sync.timeout_s = {self._config.timeout_s} s") from error
