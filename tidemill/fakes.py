"""A stand-in for an engine: for tests, simulation and dry runs.

`FakeEngine` generates without a model: tokens are a deterministic function of the prompt, the seed, the policy version
and the position, one decoding step at a time, so that weight updates, aborts and faults can hit a generation midway.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tidemill.errors import EngineError, EngineLostError, SyncError
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, FinishReason, Float32Array, Int32Array, VersionSpan

FaultKind = Literal["error", "hang", "abort", "empty", "straggle"]
Script = Callable[[Int32Array, int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the requests of one occurrence.

    Attributes:
        kind: "error" raises EngineError, "hang" never returns, "abort" returns early with that reason, "empty"
            returns no tokens, "straggle" stays at the first token until the next weight update has finished, or in mode
            "wait" has started.
        times: how many requests fail before one works; None is all of them.
    """

    kind: FaultKind
    times: int | None = None


@dataclass(slots=True)
class FakeSample:
    """One response in progress."""

    length: int
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class FakeEngine:
    """An `Engine` whose policy is uniform over `vocab` tokens, at any version.

    Args:
        seed: of the "weights"; `Sampling.seed` is mixed in.
        vocab: number of tokens; every log-prob is -ln(vocab), also in `score`.
        lengths: shortest and longest response in tokens; each sample's length is drawn in between, `max_tokens` caps.
        token_delay_s: time of one decoding step; 0 only yields to the event loop.
        faults: by occurrence, where a request id is `UID.N` as the rollouter writes it.
        refused: versions whose update fails; the engine keeps the old version.
        script: `(prompt_ids, version, sample) -> tokens` in place of the drawn response; its version is the one at
            the start of the request.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        vocab: int = 64,
        lengths: tuple[int, int] = (4, 4),
        token_delay_s: float = 0.0,
        faults: Mapping[int, Fault] | None = None,
        refused: Collection[int] = (),
        script: Script | None = None,
    ) -> None:
        self._seed, self._vocab, self._lengths, self._delay = seed, vocab, lengths, token_delay_s
        self._faults, self._refused, self._script = dict(faults or {}), refused, script
        self._hits: dict[int, int] = {}
        self._version = 0
        self._running: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()
        self._next_update = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._generated = 0
        self._dead = False
        self.aborted: list[str] = []
        self.requests: list[tuple[str, Sampling]] = []

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        await self._open.wait()
        self._check_alive()
        self.requests.append((request_id, sampling))
        aborted = self._running[request_id] = asyncio.Event()
        self._idle.clear()
        try:
            return await self._generate(request_id, aborted, prompt_ids, sampling)
        finally:
            del self._running[request_id]
            if not self._running:
                self._idle.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """Sample from `update.version` from now on.

        "wait" admits no request and lets the running ones finish first; "keep" and "abort" switch between two decoding
        steps, which looks the same from outside.
        """
        self._check_alive()
        async with self._updating:
            self._open.clear()
            coming, self._next_update = self._next_update, asyncio.Event()
            try:
                if mode == "wait":
                    coming.set()
                    await self._idle.wait()
                if update.version in self._refused:
                    raise SyncError(f"fake engine: the weights of version {update.version} did not arrive")
                self._version = update.version
            finally:
                coming.set()
                self._open.set()

    async def score(self, token_ids: Int32Array) -> Float32Array:
        self._check_alive()
        return np.full(max(0, len(token_ids) - 1), -math.log(self._vocab), dtype=np.float32)

    async def version(self) -> int:
        self._check_alive()
        return self._version

    async def stats(self) -> Mapping[str, float]:
        return {
            "running": float(len(self._running)),
            "waiting": 0.0,
            "generated_tokens": float(self._generated),
            "rss_bytes": 0.0,
        }

    async def shutdown(self) -> None:
        self._dead = True
        for aborted in self._running.values():
            aborted.set()

    async def _generate(
        self, request_id: str, aborted: asyncio.Event, prompt_ids: Int32Array, sampling: Sampling
    ) -> list[Completion]:
        fault = self._next_fault(request_id)
        if fault == "error":
            raise EngineError(f"fake engine: request {request_id} was told to fail")
        if fault == "hang":
            await aborted.wait()
        straggles = self._next_update if fault == "straggle" else None
        samples = [self._begin(prompt_ids, sampling, n) for n in range(sampling.n)]
        scripts = self._scripted(prompt_ids, samples)
        for position in range(0 if fault and not straggles else max(sample.length for sample in samples)):
            await asyncio.sleep(self._delay)
            if straggles and position == 1:
                await first_of(straggles, aborted)
            if aborted.is_set():
                break
            for n, sample in enumerate(samples):
                if position < sample.length:
                    token = scripts[n][position] if scripts else self._token(prompt_ids, sampling, n, position)
                    sample.token_ids.append(token)
                    sample.versions.append(self._version)
        self._check_alive()
        self._generated += sum(len(sample.token_ids) for sample in samples)
        cut = aborted.is_set() or fault == "abort"
        return [self._finish(sample, sampling, cut) for sample in samples]

    def _begin(self, prompt_ids: Int32Array, sampling: Sampling, n: int) -> FakeSample:
        shortest, longest = self._lengths
        drawn = shortest + self._draw(prompt_ids, sampling.seed, n, "length") % (longest - shortest + 1)
        return FakeSample(length=min(drawn, sampling.max_tokens))

    def _scripted(self, prompt_ids: Int32Array, samples: list[FakeSample]) -> list[Sequence[int]]:
        if self._script is None:
            return []
        scripts = [self._script(prompt_ids, self._version, n) for n in range(len(samples))]
        for sample, script in zip(samples, scripts, strict=True):
            sample.length = len(script)
        return scripts

    def _token(self, prompt_ids: Int32Array, sampling: Sampling, n: int, position: int) -> int:
        greedy = sampling.temperature == 0
        noise = (0, 0) if greedy else (sampling.seed, n)
        return self._draw(prompt_ids, *noise, self._version, position) % self._vocab

    def _draw(self, prompt_ids: Int32Array, *key: object) -> int:
        text = repr((self._seed, *key)).encode()
        return int.from_bytes(hashlib.blake2b(prompt_ids.tobytes() + text, digest_size=8).digest(), "little")

    def _finish(self, sample: FakeSample, sampling: Sampling, cut: bool) -> Completion:
        reason: FinishReason = "length" if len(sample.token_ids) >= sampling.max_tokens else "stop"
        if cut and len(sample.token_ids) < sample.length:
            reason = "abort"
        count = len(sample.token_ids)
        return Completion(
            token_ids=np.array(sample.token_ids, dtype=np.int32),
            log_probs=np.full(count, -math.log(self._vocab), dtype=np.float32),
            versions=spans_of(sample.versions),
            finish_reason=reason,
        )

    def _next_fault(self, request_id: str) -> FaultKind | None:
        uid = request_id.partition(".")[0]
        if not uid.isdecimal() or int(uid) not in self._faults:
            return None
        fault, hits = self._faults[int(uid)], self._hits.get(int(uid), 0)
        self._hits[int(uid)] = hits + 1
        return fault.kind if fault.times is None or hits < fault.times else None

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineLostError("fake engine: it was shut down")


async def first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Run-length encoding of the version of every token: `[4, 4, 5]` is `4: [0, 2)`, `5: [2, 3)`."""
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return tuple(spans)
