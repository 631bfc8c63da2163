"""Tidemill: the real rollout side and the real queue, on simulated engines."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from simulation.world import Taken, World
from tidemill.config.run import RunConfig
from tidemill.protocols import Sampling
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import Completion, EngineId, Group, Int32Array, Prompt, VersionSpan
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rollouter import Rollouter
from tidemill.rollout.staleness import Strategy
from tidemill.train.batch import mask_stale

TOKENS_PER_S = 4.0
TIMEOUT_S = 1e6  # virtual
GROUP_SIZE = 8  # where lengths differ within a group


class SlotEngine:
    """The part of `Engine` that a rollouter uses."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        uid = int(request_id.partition(".")[0])
        start, end = await self.world.generate(uid)
        lengths = np.random.default_rng((self.world.scenario.seed, uid)).lognormal(
            0.0, self.world.scenario.scatter, sampling.n
        )
        return [self.completion(start, start + part * (end - start)) for part in lengths / lengths.max()]

    def completion(self, start: float, end: float) -> Completion:
        """The tokens sampled between two times, each with the version of its time."""
        count = max(1, round((end - start) * TOKENS_PER_S))
        first = bisect_right(self.world.began, start) - 1
        later = self.world.began[first + 1 : bisect_left(self.world.began, end)]
        cuts = [0, *(min(count, round((began - start) * TOKENS_PER_S)) for began in later), count]
        spans = (VersionSpan(first + n, *cut) for n, cut in enumerate(itertools.pairwise(cuts)))
        tokens, log_probs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        return Completion(tokens, log_probs, tuple(span for span in spans if span.start < span.end), "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """A cancelled generation has freed its slot already."""


class Tokenizer:
    """One token a character."""

    chat_template = None

    def __call__(self, text: list[str], **options: bool) -> dict[str, list[list[int]]]:
        ids = [[ord(character) for character in each] for each in text]
        return {"input_ids": ids, "special_tokens_mask": [[0] * len(each) for each in ids]}


class NoReward:
    """Scores every response 0, at once."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        return [(0.0, {}) for _ in responses]


class Ours:
    """The real rollout side and the real queue at a `max_staleness`, and the real trainer's mask.

    Without `memory` its data repeats no prompt; the generation times are the same.
    """

    def __init__(self, world: World, max_staleness: int, memory: bool, strategy: Strategy = "pace") -> None:
        scenario = world.scenario
        self.world, self.max_staleness, self.strategy = world, max_staleness, strategy
        config = RunConfig.model_validate(
            {
                "name": "pacing",
                "model": "none",
                "data": {"train": "none.jsonl", "shuffle": memory and scenario.epochs > 1},
                "rewards": [{"function": "exact_number"}],
                "rollout": {"group_size": GROUP_SIZE if scenario.scatter else 2, "group_timeout_s": TIMEOUT_S},
                "asynchrony": {
                    "max_staleness": max_staleness,
                    "staleness_strategy": strategy,
                    "trigger_parameter_sync_step": scenario.trigger,
                },
                "trainer": {
                    "steps": (scenario.versions + max_staleness + 2) * scenario.trigger,
                    "ppo_mini_batch_size": scenario.batch,
                },
            }
        )
        rows = [{"prompt": "?"}] * (scenario.prompts if memory else scenario.occurrences)
        prompts = PromptSet(rows, Tokenizer(), config.data, scenario.seed)
        self.queue: MessageQueue[bytes] = MessageQueue(config.queue_capacity, max_staleness)
        self.rollouter = Rollouter(
            config,
            prompts,
            None,
            engines={EngineId(n): SlotEngine(world) for n in range(scenario.engines)},
            queue=self.queue,
            rewards=NoReward(),
            decode=lambda tokens: "",
            ledger=Ledger(None),
            version=0,
            clock=asyncio.get_running_loop().time,
        )
        self.lease_id = 0
        self.task = asyncio.create_task(self.rollouter.run())

    async def take(self, count: int) -> list[Taken]:
        while True:
            lease = await self.queue.lease(count, self.world.version, TIMEOUT_S)
            self.world.discard(lease.swept)
            await self.rollouter.reissue(lease.swept, "stale")
            if lease.deliveries:
                self.lease_id = lease.lease_id
                return [self.taken(Group.from_bytes(delivery.payload)) for delivery in lease.deliveries]

    def taken(self, group: Group) -> Taken:
        """The group as the trainer trains it."""
        version = self.world.version
        if self.strategy == "mask":
            group = mask_stale(group, version, self.max_staleness)
        return Taken(group.uid, version - group.age(version), group.trained_tokens / group.response_tokens)

    async def trained(self, batch: Sequence[Taken]) -> None:
        await self.queue.acknowledge(self.lease_id)
        await self.rollouter.mark_trained([group.uid for group in batch])

    async def begin_version(self, version: int) -> None:
        await self.rollouter.begin_version(version)

    async def stop(self) -> None:
        await self.rollouter.stop()
        await self.task
