"""Ours: the real rollout side and the real queue, on engines that only let time pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from simulation.world import Taken, World
from tidemill.config import RunConfig
from tidemill.protocols import Sampling
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import Completion, Int32Array, Prompt, VersionSpan
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rollouter import Rollouter

TOKENS_PER_S = 4.0
PATIENCE_S = 1e6  # virtual


class SlotEngine:
    """An `Engine` as far as a rollouter needs it."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        version, uid = self.world.version, int(request_id.partition(".")[0])
        await self.world.generate(uid)
        count = max(1, round(self.world.seconds[uid] * TOKENS_PER_S))
        tokens, log_probs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        return [Completion(tokens, log_probs, (VersionSpan(version, 0, count),), "stop") for _ in range(sampling.n)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """A cancelled generation has left its slot already."""


class Tokenizer:
    """One token a character."""

    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


class NoReward:
    """Scores nothing, at once."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        return [(0.0, {}) for _ in responses]


class Ours:
    """The real rollout side and the real queue, at a `max_staleness`.

    Without `memory` it is given data in which no prompt comes twice; the generation times are the same.
    """

    def __init__(self, world: World, max_staleness: int, memory: bool) -> None:
        scenario = world.scenario
        self.world = world
        config = RunConfig.model_validate(
            {
                "name": "pacing",
                "model": "none",
                "data": {"train": "none.jsonl", "shuffle": memory and scenario.epochs > 1},
                "rewards": [{"function": "exact_number"}],
                "rollout": {"group_size": 2, "group_timeout_s": PATIENCE_S},
                "asynchrony": {"max_staleness": max_staleness, "trigger_parameter_sync_step": scenario.trigger},
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
            engines=[SlotEngine(world) for _ in range(scenario.engines)],
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
            lease = await self.queue.lease(count, self.world.version, PATIENCE_S)
            self.world.discard(lease.swept)
            await self.rollouter.reissue(lease.swept, "stale")
            if lease.deliveries:
                self.lease_id = lease.lease_id
                return [Taken(d.header.uid, d.header.oldest_version) for d in lease.deliveries]

    async def trained(self, batch: Sequence[Taken]) -> None:
        await self.queue.acknowledge(self.lease_id)
        await self.rollouter.mark_trained([group.uid for group in batch])

    async def begin_version(self, version: int) -> None:
        await self.rollouter.begin_version(version)

    async def stop(self) -> None:
        await self.rollouter.stop()
        await self.task
