"""A rollout side without models, Ray or processes, and a trainer that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from own_time import own_time

from tidemill.config.data import DataConfig
from tidemill.config.run import RunConfig
from tidemill.errors import RewardError
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import WeightUpdate
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import EngineId, Group, Int32Array, Prompt
from tidemill.rollout.group_request import TIMEOUTS, Timeouts
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rewards import Response
from tidemill.rollout.rollouter import Rollouter
from tidemill.train.batch import mask_stale


class CharTokenizer:
    """One token a character; "^" is its special token."""

    def __init__(self, template: bool = True) -> None:
        self.chat_template = "<role>content" if template else None
        self.encoded = 0

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, return_special_tokens_mask: bool
    ) -> dict[str, list[list[int]]]:
        self.encoded += len(text)
        assert return_special_tokens_mask
        special = [1] * add_special_tokens
        return {
            "input_ids": [list(map(ord, "^" * add_special_tokens + each)) for each in text],
            "special_tokens_mask": [special + [0] * len(each) for each in text],
        }

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)


class LengthReward:
    """Rewards the length of the response; raises for the given occurrences."""

    def __init__(self, broken: Mapping[int, Exception] | None = None, always: Exception | None = None) -> None:
        self.broken, self.always = broken or {}, always

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        if self.always is not None or prompt.uid in self.broken:
            raise self.always or self.broken[prompt.uid]
        return [(float(len(response)), {"length": float(len(response))}) for response in responses]


def decode(token_ids: Int32Array) -> Response:
    return Response("".join(chr(65 + token) for token in token_ids), len(token_ids))


def run_config(**sections: Mapping[str, Any]) -> RunConfig:
    """Batches of 4 groups of 2, 5 steps, one version a step; any section may be given in part."""
    defaults: dict[str, dict[str, Any]] = {
        "data": {"train": "x.jsonl"},
        "rollout": {"group_size": 2, "max_new_tokens": 8, "group_timeout_s": 5.0},
        "trainer": {"steps": 5, "ppo_mini_batch_size": 4},
    }
    for name, values in sections.items():
        defaults[name] = {**defaults.get(name, {}), **values}
    return RunConfig.model_validate(
        {"name": "test", "model": "none", "rewards": [{"function": "exact_number"}], **defaults}
    )


def held_out(count: int = 6, **config: Any) -> PromptSet:
    rows = [{"prompt": f"{n}{'!' * n}", "answer": str(n)} for n in range(count)]
    return PromptSet(rows, CharTokenizer(), DataConfig(train="x.jsonl", **config), seed=0)


@dataclass
class Rig:
    """A Rollouter on fake engines with the real queue, and a trainer that leases, counts and begins versions."""

    config: RunConfig = field(default_factory=run_config)
    rows: int = 16
    faults: Mapping[int, Fault] = field(default_factory=dict)
    rewards: Any = field(default_factory=LengthReward)
    token_delay_s: float = 0.0
    engines: list[FakeEngine] = field(default_factory=list)
    held_out: PromptSet | None = None
    state: Mapping[str, Any] | None = None
    version: int = 0
    prompt: str = "question {}"
    surrogate_row: int | None = None  # which cannot be rendered
    clock: Callable[[], float] = own_time
    timeouts: Timeouts = TIMEOUTS

    def __post_init__(self) -> None:
        config, data = self.config, self.config.data
        rows = [{"prompt": self.prompt.format(n), "answer": str(n)} for n in range(self.rows)]
        if self.surrogate_row is not None:
            rows[self.surrogate_row]["prompt"] += "\ud83d"
        self.prompts = PromptSet(rows, CharTokenizer(), data, config.seed)
        delay = self.token_delay_s
        self.engines = self.engines or [FakeEngine(faults=self.faults, token_delay_s=delay)]
        asynchrony, queue = config.asynchrony, config.queue
        self.queue: MessageQueue[bytes] = MessageQueue(config.queue_capacity, asynchrony.max_staleness, queue.when_full)
        total = self.prompts.total
        self.ledger = Ledger(total) if self.state is None else Ledger.restore(self.state, total)
        self.trained: list[Group] = []
        self.ages: list[int] = []
        self.rollouter = Rollouter(
            config,
            self.prompts,
            self.held_out,
            engines={EngineId(n): engine for n, engine in enumerate(self.engines)},
            queue=self.queue,
            rewards=self.rewards,
            decode=decode,
            ledger=self.ledger,
            version=self.version,
            clock=self.clock,
            timeouts=self.timeouts,
        )

    async def train_step(self) -> bool:
        """One optimizer step and, for the config's trigger of 1, one weight update; False at the end of the data."""
        while True:
            lease = await self.queue.lease(self.config.required_samples, self.version, timeout_s=10)
            await self.rollouter.reissue(lease.swept, "stale")
            if lease.deliveries or lease.ended:
                break
        if len(lease.deliveries) < self.config.required_samples:
            return False
        groups = [Group.from_bytes(delivery.payload) for delivery in lease.deliveries]
        await self.queue.acknowledge(lease.lease_id)
        await self.rollouter.mark_trained([group.uid for group in groups])
        bound = self.config.asynchrony.max_staleness
        if self.config.asynchrony.staleness_strategy == "mask":  # as the trainer does
            groups = [mask_stale(group, self.version, bound) for group in groups]
        self.trained += groups
        self.ages += [group.age(self.version) for group in groups]
        assert max(self.ages) <= bound
        self.version += 1
        for engine in self.engines:
            await engine.update_weights(WeightUpdate(self.version, "", 0), self.config.pause_mode)
        await self.rollouter.begin_version(self.version)
        return True

    async def train(self, steps: int | None = None) -> int:
        """Train until the config's steps are done or the data ends; returns the number of steps."""
        for done in range(steps or self.config.trainer.steps):
            if not await self.train_step():
                return done
        return steps or self.config.trainer.steps

    async def run(self, timeout_s: float = 20.0) -> int:
        """Run both sides to the end; returns the number of steps."""
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.rollouter.run())
            steps = tasks.create_task(self.train())
        self.ledger.check()
        return steps.result()

    @property
    def uids(self) -> list[int]:
        return sorted(group.uid for group in self.trained)


BROKEN = RewardError("the reward is broken:\nZeroDivisionError: division by zero")
