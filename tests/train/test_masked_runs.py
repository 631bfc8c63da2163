"""Interrupted runs with `staleness_strategy: mask` and random settings: what they train, and their ledger."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_rig import Loop
from own_time import OwnTime
from rollout_rig import LengthReward, Rig, run_config

from tidemill.config.run import RunConfig
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import WeightUpdate
from tidemill.records import Group, Prompt, Rollout
from tidemill.train.batch import MicroBatch
from tidemill.train.trainer import Metrics, Position

End = Literal["crash", "stop", "immediate"]
Settings = Mapping[str, Any]
ROWS = 16
DEADLINE_S = 1000.0  # virtual


class SlowReward(LengthReward):
    """Takes a time that depends on the prompt."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        await asyncio.sleep(self.seconds * (prompt.uid % 3))
        return await super().score(prompt, responses)


@dataclass
class Taught:
    """What the ranks were given in one step: `targets` of all its optimizer steps, and their denominators."""

    version: int
    groups: tuple[Group, ...]
    targets: list[tuple[int, int]] = field(default_factory=list)
    denominators: list[float] = field(default_factory=list)


@dataclass(repr=False)
class Attempt:
    """One process of a run, from a commit or from the beginning, until it ends or is ended.

    Attributes:
        taught: by step.
        commits: position and ledger, the newest last.
        ends: how it is ended, and after how many seconds; None lets it go on to its end.
    """

    config: RunConfig
    drawn: Settings
    start: tuple[Position, Mapping[str, Any] | None]
    ends: tuple[End, float] | None = None
    taught: dict[int, Taught] = field(default_factory=dict)
    commits: list[tuple[Position, Mapping[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        position, state = self.start
        faults = {uid: Fault(kind, times=1) for uid, kind in self.drawn["faults"].items()}
        rig = Rig(
            self.config,
            rows=ROWS,
            state=state,
            version=position.version,
            rewards=SlowReward(self.drawn["reward_s"]),
            engines=[self.engine(n, {} if n else faults) for n in range(self.config.rollout.engines)],
        )
        self.loop = Loop(rig, self, replace(position), self.commit, self.learn, self.adopt)

    def engine(self, number: int, faults: Mapping[int, Fault]) -> FakeEngine:
        """The first one has the long responses."""
        longest = 4 if number else self.config.rollout.max_new_tokens
        return FakeEngine(self.drawn["seed"] + number, token_delay_s=0.1, lengths=(1, longest), faults=faults)

    async def learn(self) -> None:
        await asyncio.sleep(self.drawn["step_s"])

    async def adopt(self, version: int) -> None:
        delays = self.drawn["adopt_s"]
        await asyncio.sleep(delays[version % len(delays)])

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        moment, step = self.loop.steps[-1], self.loop.position.step
        taught = self.taught.setdefault(step, Taught(version, moment.groups))
        assert (taught.version, taught.groups[0].uid) == (version, moment.groups[0].uid)
        targets = [batch.targets for share in batches for batch in share]
        for some in targets:
            taught.targets += zip(some.versions.tolist(), some.target_ids.tolist(), strict=True)
        taught.denominators.append(denominator)
        return {"loss": 1.0, "tokens": float(sum(map(len, targets)))}

    async def commit(self, position: Position) -> None:
        self.commits.append((position, await self.loop.rig.rollouter.ledger_state()))

    async def run(self) -> None:
        """As `run.Run` does."""
        rig, position = self.loop.rig, self.loop.position
        if position.version:
            for engine in rig.engines:
                await engine.update_weights(WeightUpdate(position.version, "", 0), "keep")
        fit = asyncio.create_task(self.fit())
        end = asyncio.create_task(self.end(fit))
        try:
            await fit
            await self.commit(self.loop.position)
        except asyncio.CancelledError:
            assert self.ends is not None
        finally:
            end.cancel()

    async def fit(self) -> None:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.loop.rig.rollouter.run())
            await self.loop.trainer.fit()
            await self.loop.rig.rollouter.stop()
        self.loop.rig.ledger.check()

    async def end(self, fit: asyncio.Task[None]) -> None:
        if self.ends is None:
            return
        how, seconds = self.ends
        await asyncio.sleep(seconds)
        if how == "crash":
            fit.cancel()
        else:
            self.loop.trainer.stop.ask("enough", immediate=how == "immediate")


def config_of(drawn: Settings) -> RunConfig:
    asynchrony = {name: drawn[name] for name in ("max_staleness", "trigger_parameter_sync_step", "require_batches")}
    asynchrony |= {name: drawn[name] for name in ("pause_mode", "staleness_threshold")}
    return run_config(
        data={"epochs": drawn["epochs"]},
        asynchrony={"staleness_strategy": "mask", **asynchrony},
        rollout={
            "engines": drawn["engines"],
            "max_new_tokens": drawn["longest"],
            "concurrent_samples_per_replica": drawn["slots"],
            "group_size": 3,
        },
        queue={"when_full": drawn["when_full"]},
        trainer={
            "steps": drawn["steps"],
            "ppo_mini_batch_size": drawn["batch"],
            "micro_batch_tokens": drawn["room"],
            "ranks": drawn["ranks"],
        },
        algorithm={"aggregation": drawn["aggregation"], "kl_loss_coef": drawn["kl_loss_coef"]},
        checkpoint={"every": drawn["every"]},
    )


def drawn_settings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_staleness": st.sampled_from([1, 1, 2, 3]),
            "trigger_parameter_sync_step": st.sampled_from([1, 1, 1, 2, 3]),
            "require_batches": st.sampled_from([1, 1, 1, 2]),
            "pause_mode": st.sampled_from(["keep", "abort"]),
            "staleness_threshold": st.sampled_from([None, None, 1.0]),
            "epochs": st.sampled_from([1, 2, None]),
            "engines": st.sampled_from([2, 3, 1]),
            "slots": st.integers(2, 8),
            "longest": st.sampled_from([40, 30, 40, 4]),
            "when_full": st.sampled_from(["block", "drop_oldest"]),
            "steps": st.integers(3, 12),
            "batch": st.sampled_from([4, 3, 2, 1]),
            "room": st.sampled_from([20, 200]),
            "ranks": st.integers(1, 2),
            "aggregation": st.sampled_from(["token", "sequence"]),
            "kl_loss_coef": st.sampled_from([0.0, 0.1]),
            "every": st.integers(1, 2),
            "faults": st.dictionaries(
                st.integers(0, 31), st.sampled_from(["error", "hang", "abort", "empty", "straggle"]), max_size=4
            ),
            "reward_s": st.sampled_from([0.0, 0.3]),
            "step_s": st.sampled_from([0.0, 0.1, 0.3, 0.6]),
            "adopt_s": st.lists(st.sampled_from([0.0, 0.0, 0.2, 1.0]), min_size=1, max_size=3),
            "seed": st.integers(0, 99),
        }
    )


def interruptions() -> st.SearchStrategy[list[tuple[End, float]]]:
    return st.lists(st.tuples(st.sampled_from(["crash", "stop", "immediate"]), st.floats(0.0, 6.0)), max_size=3)


async def run_to_the_end(
    config: RunConfig, drawn: Settings, interruptions: Sequence[tuple[End, float]]
) -> list[Attempt]:
    attempts, start = list[Attempt](), (Position(), None)
    for ending in [*interruptions, None]:
        attempts.append(Attempt(config, drawn, start, ending))
        await attempts[-1].run()
        start = attempts[-1].commits[-1] if attempts[-1].commits else start
    return attempts


def recent(rollout: Rollout, oldest: int) -> list[tuple[int, int]]:
    """Version and token of all that is not older, one by one."""
    found = []
    for span in rollout.versions:
        found += [(span.version, int(rollout.token_ids[n])) for n in range(span.start, span.end)]
    return [(version, token) for version, token in found if version >= oldest]


def young_ones(config: RunConfig, taught: Taught) -> list[list[list[tuple[int, int]]]]:
    """`recent` of each rollout of each group of a step."""
    oldest = taught.version - config.asynchrony.max_staleness
    return [[recent(rollout, oldest) for rollout in group.rollouts] for group in taught.groups]


def check_taught(config: RunConfig, taught: Taught) -> None:
    """The ranks got exactly the recent tokens, and their number as the denominator."""
    targets, denominators, size = list[tuple[int, int]](), list[float](), config.trainer.ppo_mini_batch_size
    kept = young_ones(config, taught)
    for group, parts in zip(taught.groups, kept, strict=True):
        for rollout, part in zip(group.rollouts, parts, strict=True):
            if config.algorithm.kl_loss_coef or rollout.reward != group.rewards.mean():
                targets += part
    for start in range(0, len(kept), size):
        lengths = [len(part) for parts in kept[start : start + size] for part in parts]
        denominators.append(sum(lengths) if config.algorithm.aggregation == "token" else np.count_nonzero(lengths))
    assert sorted(taught.targets) == sorted(targets)
    assert taught.denominators == denominators
    assert min(denominators) > 0


def check_reported(config: RunConfig, taught: Taught, metrics: Metrics) -> None:
    kept = young_ones(config, taught)
    ages = [[taught.version - version for part in parts for version, _ in part] for parts in kept]
    oldest, every = [max(group) for group in ages], [age for group in ages for age in group]
    sampled = sum(group.response_tokens for group in taught.groups)
    assert all(0 <= age <= config.asynchrony.max_staleness for age in every)
    assert (metrics["response/tokens"], metrics["response/trained_tokens"]) == (sampled, len(every))
    assert metrics["staleness/masked_tokens"] == sampled - len(every)
    assert metrics["staleness/token_mean"] == pytest.approx(np.mean(every))
    assert metrics["staleness/mean"] == pytest.approx(np.mean(oldest))
    assert metrics["staleness/max"] == max(oldest)
    assert metrics["staleness/stale_groups"] == np.count_nonzero(oldest)
    assert metrics["staleness/stale_rollouts"] == sum(
        any(version < taught.version for version, _ in part) for parts in kept for part in parts
    )
    for age in range(max(oldest) + 1):
        assert metrics[f"staleness/groups_of_age/{age}"] == oldest.count(age)


async def check_attempt(config: RunConfig, attempt: Attempt) -> None:
    rig, reported = attempt.loop.rig, attempt.loop.metrics
    for taught, metrics in zip(attempt.taught.values(), reported, strict=False):  # the last one may have been cut
        check_taught(config, taught)
        check_reported(config, taught, metrics)
    assert all(ledger["trained"] == position.groups for position, ledger in attempt.commits)
    assert "never_fits" not in rig.ledger.quarantined.values()
    if attempt.ends is None or attempt.ends[0] != "crash":
        assert len(attempt.taught) == len(reported)
        rest = await rig.rollouter.stats()
        wasted = sum(m.get("rollout/wasted_tokens", 0) for m in reported) + rest.get("wasted_tokens", 0)
        taken = sum(m["response/trained_tokens"] + m["staleness/masked_tokens"] for m in reported)
        left = sum(rig.rollouter._accounting._sampled.values())  # of groups in the queue of a run that was stopped
        assert sum(engine._generated for engine in rig.engines) == taken + wasted + left


def check_run(config: RunConfig, attempts: Sequence[Attempt]) -> None:
    kept = list[Taught]()  # that no crash took back
    for attempt, later in itertools.zip_longest(attempts, attempts[1:]):
        end = later.start[0].step if later else attempt.loop.position.step
        kept += [taught for step, taught in attempt.taught.items() if step < end]
    uids = [group.uid for taught in kept for group in taught.groups]
    position, ledger = attempts[-1].loop.position, attempts[-1].loop.rig.ledger
    assert len(set(uids)) == len(uids) == position.groups == ledger.trained_count
    tokens = [part for taught in kept for parts in young_ones(config, taught) for part in parts]
    assert position.response_tokens == sum(map(len, tokens))
    assert position.unsynced == 0
    total = math.inf if config.data.epochs is None else config.data.epochs * ROWS - len(ledger.quarantined)
    if total >= config.trainer.steps * config.required_samples:
        assert position.step == config.trainer.steps
    else:
        assert len(uids) == total


def play(drawn: Settings, interruptions: Sequence[tuple[End, float]]) -> list[Attempt]:
    config = config_of(drawn)

    async def run() -> list[Attempt]:
        attempts = await run_to_the_end(config, drawn, interruptions)
        for attempt in attempts:
            await check_attempt(config, attempt)
        return attempts

    with asyncio.Runner(loop_factory=OwnTime) as runner:
        attempts = runner.run(run())
    check_run(config, attempts)
    return attempts


@settings(max_examples=60, deadline=None)
@given(drawn_settings(), interruptions())
def test_an_interrupted_run_trains_every_recent_token_once_and_its_ledger_is_consistent(
    drawn: Settings, interrupted: list[tuple[End, float]]
) -> None:
    play(drawn, interrupted)
