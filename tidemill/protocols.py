"""The interfaces between the parts of a run.

Each docstring names the real implementation. The stand-ins are in `tidemill.fakes`; both pass the same contract suite
in `tests/contracts`. All methods are asynchronous, because every call may cross a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
        priority: an engine without room for all requests serves those of the lowest value first.
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
        """Sample `sampling.n` completions, in order. An aborted request returns the tokens so far, reason "abort".

        Raises:
            EngineLostError: the engine is dead.
            EngineError: the engine refuses the request, for example a prompt longer than its context.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ones are ignored, because they may have finished."""
        ...

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """Pause, load, label with the version, resume. After a failure the engine resumes too, if it holds one version.

        Raises:
            SyncError: the weights did not arrive whole.
            EngineLostError: the engine is dead, or did not answer in time.
        """
        ...

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """`[T-1]` natural log-probs of `token_ids[1:]`, each given the tokens before it, at temperature 1."""
        ...

    async def version(self) -> int:
        """The version that new tokens are sampled from.

        Raises:
            EngineLostError: the engine is dead.
        """
        ...

    async def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests, `generated_tokens` so far, `rss_bytes` of the engine and its children."""
        ...

    async def shutdown(self) -> None:
        """Free everything; generations in flight fail."""
        ...


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Ref]):
    """A group in the queue: its header and its payload (`Group.to_bytes`), or a reference to the payload."""

    header: GroupHeader
    payload: Ref


@dataclass(frozen=True, slots=True)
class Lease(Generic[Ref]):
    """Groups handed to a consumer, to be acknowledged or returned.

    Attributes:
        lease_id: names the lease in `acknowledge` and `release`.
        deliveries: ordered by uid.
        swept: uids removed because they exceed the staleness bound; the consumer reissues them.
        ended: the queue is closed, and no group follows this lease.
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
        """Forget the groups of this lease, which are trained."""
        ...

    async def release(self, lease_id: int) -> None:
        """Return the groups of this lease to the head, in order."""
        ...

    async def close(self) -> None:
        """End the data: no group will follow. Displaces nothing and wakes every waiting call."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """`depth`, `leased`, `capacity`, `put`, `trained`, `dropped`, `swept`, `oldest_version`."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out prompt and the answer of the policy."""

    prompt: str
    response: str
    expected: str | None
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out score of one policy version, from one greedy answer per prompt.

    Attributes:
        version: that every token of all answers was sampled from.
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
        """The skipped prompts in words; "" if there are none."""
        counted = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items()))
        return f"held-out prompts without an answer, which the score does not include: {counted}" if counted else ""


def evaluation_from_json(text: str) -> Evaluation | None:
    """Read a score that was written as JSON; `null` is no score.

    Raises:
        DataError: the text is not a score.
    """
    try:
        tree = json.loads(text)
        return None if tree is None else Evaluation(**tree | {"answers": tuple(Answer(**a) for a in tree["answers"])})
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"not a score on held-out prompts: {error}") from error


class EngineFleet(Protocol):
    """The engines as the trainer sees them: `rollout.fleet.Fleet`."""

    async def publish(self, version: int, mode: PauseMode, exported: Callable[[], None]) -> Mapping[str, float]:
        """Bring the trainer's present weights to the engines as `version`, and check the canary; returns the timings.

        `exported` is called once, when the weights may change.
        """
        ...

    async def reserve_spare(self) -> EngineId | None:
        """Take an engine out of rollout and weight syncs; None if it is the only one."""
        ...

    async def release_spare(self, engine: EngineId) -> None:
        """Bring an engine to the newest version and return it to rollout."""
        ...


class Generation(Protocol):
    """The rollout side as the trainer sees it: `rollout.rollouter.Rollouter`."""

    async def begin_version(self, version: int) -> None:
        """The engines now sample from `version`: cancel groups that became too old, admit more."""
        ...

    async def mark_trained(self, uids: Sequence[int]) -> None:
        """Count these occurrences as trained: the parameters contain them now."""
        ...

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        """Count these groups as dropped for `reason` and generate them again."""
        ...

    async def ledger_state(self) -> Mapping[str, object]:
        """JSON value from which `Ledger.restore` continues after a restart."""
        ...

    async def evaluate(self, version: int, engine: EngineId | None = None) -> Evaluation:
        """Score the held-out prompts with the present weights of the engines, or of a cordoned one.

        Raises:
            EngineLostError: the cordoned engine is lost.
        """
        ...

    async def loads(self) -> Loads:
        """Changes of the requests in flight since the last call, for the run's timeline."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """Counters and ratios since the last call, see `docs/metrics.md`."""
        ...
