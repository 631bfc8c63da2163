"""The rollouter in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from tidemill.actors.call import CONTROL_TIMEOUT_S, MAX_CALLS, call
from tidemill.actors.engine import RemoteEngine
from tidemill.actors.placement import service_place
from tidemill.config.run import RunConfig
from tidemill.models.locate import Locator, fetch_model_once
from tidemill.protocols import Engine, Evaluation, Loads
from tidemill.records import Int32Array
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import (
    PromptSet,
    check_same_data,
    data_digests,
    load_held_out,
    load_prompts,
    load_tokenizer,
)
from tidemill.rollout.reward_pool import RewardPool
from tidemill.rollout.rollouter import Rollouter

MAX_REWARD_WORKERS = 32


class RolloutActor:
    """The rollouter in a process of its own, with its tokenizer and its reward workers."""

    prompts: PromptSet
    rewards: RewardPool
    rollouter: Rollouter

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
        tokenizer = load_tokenizer(self.model_path or (await asyncio.to_thread(fetch_model_once, config)).path)
        fetch = Locator.of(config).fetch_file
        self.prompts = load_prompts(config.data, tokenizer, config.seed, fetch)
        held_out = load_held_out(config.data, tokenizer, config.seed, fetch)
        self.digests = data_digests(self.prompts, held_out)
        if self.restored is not None:
            check_same_data(config.data, self.restored, self.digests)
        total = self.prompts.total
        self.rewards = RewardPool(config.rewards, reward_workers(), [self.search_path])
        self.rollouter = Rollouter(
            config,
            self.prompts,
            held_out,
            engines=self.engines,
            queue=self.queue,
            rewards=self.rewards,
            decode=partial(decode, tokenizer),
            ledger=Ledger(total) if self.restored is None else Ledger.restore(self.restored, total),
            version=self.version,
        )
        await self.rewards.start()

    async def run(self) -> None:
        """Generate until the data or the run ends."""
        await self.rollouter.run()

    async def evaluate(self, version: int, engine: str | None) -> Evaluation:
        """See `Generation`."""
        return await self.rollouter.evaluate(version, engine)

    async def begin_version(self, version: int) -> None:
        """See `Generation`."""
        await self.rollouter.begin_version(version)

    async def mark_trained(self, uids: Sequence[int]) -> None:
        """See `Generation`."""
        await self.rollouter.mark_trained(uids)

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        """See `Generation`."""
        await self.rollouter.reissue(uids, reason)

    async def ledger_state(self) -> Mapping[str, object]:
        """See `Generation`; with the digests of the data that its numbers stand for."""
        return {**await self.rollouter.ledger_state(), **self.digests}

    async def loads(self) -> Loads:
        """See `Generation`."""
        return await self.rollouter.loads()

    async def add_engine(self, name: str, engine: Engine) -> None:
        """See `Rollouter`."""
        await self.rollouter.add_engine(name, engine)

    async def remove_engine(self, name: str, reason: str, patience_s: float) -> int:
        """See `Rollouter`."""
        return await self.rollouter.remove_engine(name, reason, patience_s)

    async def set_engine_aside(self, name: str) -> None:
        """See `Rollouter`."""
        await self.rollouter.set_engine_aside(name)

    async def take_engine_back(self, name: str) -> None:
        """See `Rollouter`."""
        await self.rollouter.take_engine_back(name)

    async def lost_engines(self) -> Mapping[str, str]:
        """See `Rollouter`."""
        return await self.rollouter.lost_engines()

    async def stats(self) -> Mapping[str, float]:
        """See `Generation`."""
        return await self.rollouter.stats()

    async def canary(self) -> Int32Array:
        """`[T]` int32, tokens whose log-probs trainer and engines must agree on."""
        return self.prompts.canary()

    async def stop(self) -> None:
        """End generation."""
        await self.rollouter.stop()

    async def close(self) -> None:
        """End the reward workers."""
        await self.rewards.close()


def reward_workers() -> int:
    """Processes that score: at least two, so that a function that hangs does not hold up all others."""
    return min(MAX_REWARD_WORKERS, max(2, len(os.sched_getaffinity(0)) // 2))


def decode(tokenizer: Any, token_ids: Int32Array) -> str:
    """The text of a response, special tokens left out."""
    text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    return text


@dataclass(frozen=True, slots=True)
class RemoteGeneration:
    """The rollouter in another process."""

    actor: Any

    async def start(self) -> None:
        """Wait until prompts and rewards can be used; the caller has the deadline."""
        await call("the rollouter", self.actor.start.remote(), None)

    async def run(self) -> None:
        """Generate until the data or the run ends; raises what went wrong there."""
        await call("the rollouter", self.actor.run.remote(), None)

    async def begin_version(self, version: int) -> None:
        """See `Generation`."""
        await call("the rollouter", self.actor.begin_version.remote(version))

    async def mark_trained(self, uids: Sequence[int]) -> None:
        """See `Generation`."""
        await call("the rollouter", self.actor.mark_trained.remote(list(uids)))

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        """See `Generation`."""
        await call("the rollouter", self.actor.reissue.remote(list(uids), reason))

    async def ledger_state(self) -> Mapping[str, object]:
        """See `Generation`."""
        return await call("the rollouter", self.actor.ledger_state.remote())

    async def evaluate(self, version: int, engine: str | None = None) -> Evaluation:
        """See `Generation`; every answer has `rollout.group_timeout_s` inside."""
        return await call("the rollouter", self.actor.evaluate.remote(version, engine), None)

    async def loads(self) -> Loads:
        """See `Generation`."""
        return await call("the rollouter", self.actor.loads.remote())

    async def add_engine(self, name: str, engine: Engine) -> None:
        """See `rollout.fleet.Rotation`."""
        await call("the rollouter", self.actor.add_engine.remote(name, engine))

    async def remove_engine(self, name: str, reason: str, patience_s: float = 0.0) -> int:
        """See `rollout.fleet.Rotation`."""
        removing = self.actor.remove_engine.remote(name, reason, patience_s)
        return await call("the rollouter", removing, patience_s + CONTROL_TIMEOUT_S)

    async def set_engine_aside(self, name: str) -> None:
        """See `rollout.fleet.Rotation`."""
        await call("the rollouter", self.actor.set_engine_aside.remote(name))

    async def take_engine_back(self, name: str) -> None:
        """See `rollout.fleet.Rotation`."""
        await call("the rollouter", self.actor.take_engine_back.remote(name))

    async def lost_engines(self) -> Mapping[str, str]:
        """See `rollout.fleet.Rotation`."""
        return await call("the rollouter", self.actor.lost_engines.remote())

    async def stats(self) -> Mapping[str, float]:
        """See `Generation`."""
        return await call("the rollouter", self.actor.stats.remote())

    async def canary(self) -> Int32Array:
        """Tokens for the canary of the weight sync."""
        return await call("the rollouter", self.actor.canary.remote())

    async def stop(self) -> None:
        """End generation."""
        await call("the rollouter", self.actor.stop.remote())

    async def close(self) -> None:
        """End the reward workers."""
        await call("the rollouter", self.actor.close.remote())


def start_rollouter(
    config: RunConfig,
    model_path: str | None,
    engines: Sequence[RemoteEngine],
    queue: Any,
    ledger: Mapping[str, object] | None,
    version: int,
) -> RemoteGeneration:
    """Place the rollouter."""
    shell = ray.remote(RolloutActor).options(max_concurrency=MAX_CALLS, **service_place(config).options())
    actor = shell.remote(config, model_path, engines, queue, ledger, version, os.getcwd())
    return RemoteGeneration(actor)
