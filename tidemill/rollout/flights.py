"""Groups in flight, and the engines they fly on."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidemill.errors import EngineError
from tidemill.protocols import Engine
from tidemill.records import Int32Array, Prompt
from tidemill.rollout.activity import LoadMeter

LOG = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0

Stage = Literal["generating", "scoring", "delivering"]
Decode = Callable[[Int32Array], str]


class Scorer(Protocol):
    """What scores the responses to a prompt: `reward_pool.RewardPool`."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[tuple[float, Mapping[str, float]]]:
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
        stage: where it is; "delivering" from the moment at which its group is finished.
        task: runs it; set right after it is made.
    """

    prompt: Prompt
    number: int
    version: int
    started: float
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


class EnginePool:
    """Chooses the engine of a group: the one with the fewest failures in a row, then the least loaded.

    An engine that is dead answers at once, with an error, and would otherwise look idle and attract every group.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._load = [0] * len(engines)
        self._failures = [0] * len(engines)
        self.loads = LoadMeter()

    def __len__(self) -> int:
        return len(self._engines)

    @contextmanager
    def lease(self) -> Iterator[Engine]:
        """An engine for the time of one request; an exception other than cancellation counts as its failure."""
        chosen = min(range(len(self._engines)), key=lambda n: (self._failures[n], self._load[n]))
        self._load[chosen] += 1
        self.loads.note(f"engine {chosen}", self._load[chosen])
        try:
            yield self._engines[chosen]
        except Exception:
            self._failures[chosen] += 1
            raise
        else:
            self._failures[chosen] = 0
        finally:
            self._load[chosen] -= 1
            self.loads.note(f"engine {chosen}", self._load[chosen])

    def forgive(self) -> None:
        """Forget the failures: engines that failed may have been repaired or replaced."""
        self._failures = [0] * len(self._engines)


def group_seed(seed: int, uid: int, failures: int) -> int:
    """Sampling seed of a group in [0, 2^31), a function of the run's seed, the occurrence and its failed attempts.

    A failed attempt must not be repeated token by token; a dropped one, or one lost in a restart, is: the same seed
    makes a resumed synchronous run equal to an uninterrupted one.
    """
    digest = hashlib.blake2b(repr((seed, uid, failures)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


async def abort_request(engine: Engine, request_id: str) -> None:
    """End a request, if the engine answers in time; the request is given up in any case."""
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await engine.abort([request_id])
    except (TimeoutError, EngineError) as error:
        LOG.warning("request %s could not be aborted: %r", request_id, error)
