"""The rollouter in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from tidemill.actors.call import CONTROL_TIMEOUT_S, MAX_CALLS, Remote, delegate, delegated, forward
from tidemill.actors.engine import RemoteEngine
from tidemill.actors.placement import service_placement
from tidemill.config.run import RunConfig
from tidemill.models.hf_config import vocab_size_of
from tidemill.models.locate import Locator, fetch_model_once
from tidemill.protocols import Generation
from tidemill.records import EngineId, Int32Array
from tidemill.rollout.fleet import Rotation
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import (
    PromptSet,
    check_same_data,
    data_digests,
    load_held_out,
    load_prompts,
    load_tokenizer,
)
from tidemill.rollout.reward_pool import RewardPool, decode, with_raw
from tidemill.rollout.rollouter import Rollouter

MAX_REWARD_WORKERS = 32


@delegate(Generation, Rotation)
class RolloutActor:
    """The rollouter in a process of its own, with its tokenizer and its reward workers."""

    prompts: PromptSet
    rewards: RewardPool
    rollouter: Rollouter

    run = delegated(Rollouter.run)
    stop = delegated(Rollouter.stop)

    def __init__(
        self,
        config: RunConfig,
        model_path: str | None,
        engines: Sequence[RemoteEngine],
        queue: Any,
        ledger: Mapping[str, object] | None,
        version: int,
        search_path: str,
    ) -> None:
        self.config, self.model_path, self.engines, self.queue = config, model_path, engines, queue
        self.restored, self.version, self.search_path = ledger, version, search_path

    async def start(self) -> None:
        """Read the prompts and start the reward workers; not in the constructor, whose errors look like its death."""
        config = self.config
        folder = Path(self.model_path or (await asyncio.to_thread(fetch_model_once, config)).path)
        tokenizer, vocab_size = load_tokenizer(folder), vocab_size_of(folder)
        fetch = Locator.of(config).fetch_file
        self.prompts = load_prompts(config.data, tokenizer, config.seed, fetch, vocab_size)
        held_out = load_held_out(config.data, tokenizer, config.seed, fetch, vocab_size)
        self.digests = data_digests(self.prompts, held_out)
        if self.restored is not None:
            check_same_data(config.data, self.restored, self.digests)
        total = self.prompts.total
        self.rewards = RewardPool(config.rewards, reward_workers(), [self.search_path])
        self.rollouter = Rollouter(
            config,
            self.prompts,
            held_out,
            engines={engine.id: engine for engine in self.engines},
            queue=self.queue,
            rewards=self.rewards,
            decode=partial(decode, tokenizer, with_raw(config.rewards)),
            ledger=Ledger(total) if self.restored is None else Ledger.restore(self.restored, total),
            version=self.version,
        )
        await self.rewards.start()

    def target(self) -> Rollouter:
        return self.rollouter

    async def ledger_state(self) -> Mapping[str, object]:
        """The ledger, with the digests of the data that its numbers refer to."""
        return {**await self.rollouter.ledger_state(), **self.digests}

    async def canary(self) -> Int32Array:
        """`[T]` int32, tokens whose log-probs trainer and engines must agree on."""
        return self.prompts.canary()

    async def close(self) -> None:
        await self.rewards.close()


def reward_workers() -> int:
    """Number of processes that score: at least two, so that a function that hangs does not block all others."""
    return min(MAX_REWARD_WORKERS, max(2, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True)
class RemoteRollouter(Remote):
    """The rollouter in another process: `Generation` and `rollout.fleet.Rotation`."""

    actor: Any
    name = "the rollouter"

    start = forward(RolloutActor.start, timeout_s=None)
    run = forward(Rollouter.run, timeout_s=None)
    canary = forward(RolloutActor.canary)
    stop = forward(Rollouter.stop)
    close = forward(RolloutActor.close)

    begin_version = forward(Generation.begin_version)
    mark_trained = forward(Generation.mark_trained)
    reissue = forward(Generation.reissue)
    ledger_state = forward(Generation.ledger_state)
    evaluate = forward(Generation.evaluate, timeout_s=None)  # every answer has `rollout.group_timeout_s`
    loads = forward(Generation.loads)
    stats = forward(Generation.stats)

    add_engine = forward(Rotation.add_engine)
    cordon_engine = forward(Rotation.cordon_engine)
    uncordon_engine = forward(Rotation.uncordon_engine)
    lost_engines = forward(Rotation.lost_engines)

    async def remove_engine(self, engine_id: EngineId, reason: str, drain_s: float = 0.0) -> int:
        """As `Rotation.remove_engine`; the deadline of the call is longer by `drain_s`."""
        removing = self.actor.remove_engine.remote(engine_id, reason, drain_s)
        return await self.answer(removing, drain_s + CONTROL_TIMEOUT_S)


def start_rollouter(
    config: RunConfig,
    model_path: str | None,
    engines: Sequence[RemoteEngine],
    queue: Any,
    ledger: Mapping[str, object] | None,
    version: int,
) -> RemoteRollouter:
    shell = ray.remote(RolloutActor).options(max_concurrency=MAX_CALLS, **service_placement(config).options())
    actor = shell.remote(config, model_path, engines, queue, ledger, version, os.getcwd())
    return RemoteRollouter(actor)
