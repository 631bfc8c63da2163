"""Groups in flight."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidemill.errors import EngineError
from tidemill.protocols import Engine
from tidemill.records import Completion, Int32Array, Prompt
from tidemill.rollout.rewards import Response

LOG = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 1.0  # of a request that is aborted

Stage = Literal["generating", "scoring", "delivering"]
Decode = Callable[[Int32Array], str]


class Scorer(Protocol):
    """What scores the responses to a prompt: `reward_pool.RewardPool`."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[tuple[float, Mapping[str, float]]]:
        """Total and parts for every response, in order.

        Raises:
            RewardTimeoutError: a function did not return in time.
            RewardError: a function failed.
        """
        ...


@dataclass(slots=True)
class Flight:
    """One dispatch of one occurrence.

    Attributes:
        prompt: of the occurrence.
        number: ordinal of the dispatch in this process; makes the request id unique.
        version: the policy version at dispatch: no token can be older.
        started: when, by the rollouter's clock.
        engine: the name of the engine that generates it, or did.
        stage: where it is; "delivering" from the moment at which its group is finished.
        task: runs it; set right after it is made.
    """

    prompt: Prompt
    number: int
    version: int
    started: float
    engine: str | None = None
    stage: Stage = "generating"
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def uid(self) -> int:
        """The occurrence."""
        return self.prompt.uid

    @property
    def request_id(self) -> str:
        """`UID.N`, unique in a process."""
        return f"{self.uid}.{self.number}"


def group_seed(seed: int, uid: int, failures: int) -> int:
    """Sampling seed of a group in [0, 2^31), a function of the run's seed, the occurrence and its failed attempts.

    A failed attempt must not be repeated token by token; a dropped one, or one lost in a restart, is: the same seed
    makes a resumed synchronous run equal to an uninterrupted one.
    """
    digest = hashlib.blake2b(repr((seed, uid, failures)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


async def give_up(engine: Engine, request_id: str, answer: asyncio.Future[list[Completion]]) -> int:
    """End a request as `abort_request` does; returns the tokens that it had sampled, as far as `answer` says soon."""
    await abort_request(engine, request_id)
    await asyncio.wait([answer], timeout=ANSWER_TIMEOUT_S)
    if not answer.done():
        answer.cancel()
        return 0
    return 0 if answer.cancelled() or answer.exception() is not None else tokens_of(answer.result())


def tokens_of(completions: Sequence[Completion]) -> int:
    """Sampled tokens of a group."""
    return sum(len(completion.token_ids) for completion in completions)


async def abort_request(engine: Engine, request_id: str) -> None:
    """End a request, if the engine answers in time; the request is given up in any case."""
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await engine.abort([request_id])
    except (TimeoutError, EngineError) as error:
        LOG.warning("request %s could not be aborted: %r", request_id, error)
