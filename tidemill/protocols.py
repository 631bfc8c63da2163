"""The seams of a run: what each part may ask of the others.

Each protocol has a real implementation (named beside it) and a stand-in in `tidemill.fakes`; both pass the same
contract suite in `tests/contracts`. Everything here is asynchronous, because every call may cross a process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from tidemill.errors import DataError
from tidemill.records import Completion, EngineId, Float32Array, GroupHeader, Int32Array

PauseMode = Literal["keep", "abort", "wait"]
Ref = TypeVar("Ref")
Loads = Mapping[EngineId, Sequence[tuple[float, int]]]
"""Requests in flight of each engine: at which second since the epoch their number changed, and to what."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one group.

    Attributes:
        n: samples per prompt.
        max_tokens: budget of response tokens per sample.
        temperature: 0 is greedy.
        seed: makes the samples reproducible on an otherwise idle engine; None draws from the engine's state.
        stop: strings that end a sample.
        priority: requests of a lower one are served first where an engine has no room for all.
    """

    n: int
    max_tokens: int
    temperature: float
    seed: int | None = None
    stop: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Where an engine finds the weights of one version.

    Attributes:
        version: policy version these weights are.
        path: safetensors file on a memory-backed file system, Hugging Face parameter names.
        nbytes: its size; a file of another size is refused.
    """

    version: int
    path: str
    nbytes: int


class Engine(Protocol):
    """Generates tokens with one version of the policy: `inference.engine.VllmEngine`."""

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        """Sample `sampling.n` completions, in order. An aborted request returns what it has, reason "abort".

        Raises:
            EngineLostError: the engine is dead.
            EngineError: it refuses the request (a prompt longer than its context).
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ones are ignored, because they may just have finished."""
        ...

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """Pause, load, label with the version, resume; on failure the engine is resumed all the same.

        Raises:
            SyncError: the weights did not arrive whole.
            EngineLostError: the engine is dead, or did not answer in time.
        """
        ...

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """`[T-1]` natural log-probs of `token_ids[1:]` given what stands before each, at temperature 1."""
        ...

    async def version(self) -> int:
        """The version that new tokens are sampled from.

        Raises:
            EngineLostError: the engine is dead.
        """
        ...

    async def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests, `generated_tokens` so far, `rss_bytes` of engine and children."""
        ...

    async def shutdown(self) -> None:
        """Free everything; generations in flight fail."""
        ...


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Ref]):
    """A group in the queue: its header and its payload (`Group.to_bytes`), or where that is."""

    header: GroupHeader
    payload: Ref


@dataclass(frozen=True, slots=True)
class Lease(Generic[Ref]):
    """Groups handed to a consumer, to be acknowledged or returned.

    Attributes:
        lease_id: names the lease in `acknowledge` and `release`.
        deliveries: ordered by uid.
        swept: uids removed because they exceed the staleness bound; the consumer has them issued again.
        ended: the queue is closed and nothing is left behind this lease.
    """

    lease_id: int
    deliveries: tuple[Delivery[Ref], ...]
    swept: tuple[int, ...] = ()
    ended: bool = False


class Queue(Protocol[Ref]):
    """Bounded queue of finished groups: `queue.message_queue.MessageQueue`."""

    async def put(self, deliveries: Sequence[Delivery[Ref]], timeout_s: float) -> list[int]:
        """Append in order, waiting for room; returns the uids dropped for it (policy `drop_oldest`).

        Raises:
            TimeoutError: no room in time; nothing of `deliveries` was stored.
        """
        ...

    async def lease(self, count: int, version: int, timeout_s: float) -> Lease[Ref]:
        """Wait for `count` groups no older than the bound at `version`; fewer only once the queue is closed.

        Raises:
            TimeoutError: not enough groups in time; nothing was taken.
        """
        ...

    async def acknowledge(self, lease_id: int) -> None:
        """The groups of this lease are trained; forget them."""
        ...

    async def release(self, lease_id: int) -> None:
        """Return the groups of this lease to the head, in order."""
        ...

    async def close(self) -> None:
        """No group will follow. Displaces nothing and wakes every waiter."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """`depth`, `leased`, `capacity`, `put`, `trained`, `dropped`, `swept`, `oldest_version`."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out prompt and what the policy said."""

    prompt: str
    response: str
    expected: str | None
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out score of one policy version; greedy, one answer a prompt.

    Attributes:
        version: the one version that all answers were sampled from, start to end.
        score: mean reward.
        answers: one per prompt, in the order of the data.
        skipped: prompts left out, by reason: `too_long`, `reward_error`, `reward_timeout`, `kills_engine`.
    """

    version: int
    score: float
    answers: tuple[Answer, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> str:
        """What the score says nothing of, in words; "" if nothing."""
        counted = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items()))
        return f"held-out prompts without an answer, which the score leaves out: {counted}" if counted else ""


def evaluation_from_json(text: str) -> Evaluation | None:
    """Read a score that was written as JSON; `null` says that there is none.

    Raises:
        DataError: it is something else.
    """
    try:
        tree = json.loads(text)
        return None if tree is None else Evaluation(**tree | {"answers": tuple(Answer(**a) for a in tree["answers"])})
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"not a score on held-out prompts: {error}") from error


class Generation(Protocol):
    """The rollout side as the trainer sees it: `rollout.rollouter.Rollouter`."""

    async def begin_version(self, version: int) -> None:
        """The engines now sample from `version`: admit more, cancel what became too old."""
        ...

    async def mark_trained(self, uids: Sequence[int]) -> None:
        """These occurrences are in the parameters now."""
        ...

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        """These groups were dropped on the way; count them and generate them again."""
        ...

    async def ledger_state(self) -> Mapping[str, object]:
        """JSON value from which `Ledger.restore` goes on after a restart."""
        ...

    async def evaluate(self, version: int, engine: EngineId | None = None) -> Evaluation:
        """Score the held-out prompts with the engines' present weights, or with those of one engine that is set aside.

        Raises:
            EngineLostError: that engine is lost.
        """
        ...

    async def loads(self) -> Loads:
        """Requests in flight since the last call, for the run's timeline."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """Counters and ratios since the last call: see `docs/metrics.md`."""
        ...
