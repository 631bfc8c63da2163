"""Asynchrony off is synchronous training to the last bit, and a run that was cut is one that was not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_rig import InProcess, Loop
from own_time import OwnTime
from rollout_rig import LengthReward, Rig, decode, run_config
from train_rig import make_rank, save_llama

from tidemill.actors.ranks import RankActor
from tidemill.config.run import RunConfig
from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling, WeightUpdate
from tidemill.records import Group
from tidemill.rollout.group_request import group_seed, make_group
from tidemill.train.advantages import estimate
from tidemill.train.batch import micro_batches, step_denominator
from tidemill.train.packing import PackedRow, pack_group
from tidemill.train.policy import PolicyRank
from tidemill.train.trainer import Position

pytestmark = pytest.mark.own_time
ON_POLICY = [{"max_staleness": 0}, {"max_staleness": 1, "staleness_threshold": 0}]
STEPS = 5
STUB: dict[str, Any] = {"lengths": (1, 8), "vocab": 60}


@pytest.fixture(scope="session")
def ascii_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has a token for every character of the rig's prompts."""
    return save_llama(tmp_path_factory.mktemp("ascii"), vocabulary=128)


def numbers(report: Mapping[str, float]) -> tuple[float, ...]:
    """What must not differ by a bit, from a trainer's metrics or a rank's own report."""
    renamed = {"loss/policy": "loss", "loss/grad_norm": "grad_norm"}
    plain = {renamed.get(name, name): value for name, value in report.items()}
    return tuple(plain[name] for name in ("loss", "grad_norm", "ratio/mean", "kl/old_new"))


async def sample(rig: Rig, engine: FakeEngine, uid: int) -> Group:
    """One group, generated and scored by hand."""
    config, prompt = rig.config, rig.prompts.prompt(uid)
    rollout = config.rollout
    sampling = Sampling(
        rollout.group_size, rollout.max_new_tokens, rollout.temperature, group_seed(config.seed, uid, 0)
    )
    completions = await engine.generate(f"{uid}.0", prompt.token_ids, sampling)
    texts = [decode(completion.token_ids) for completion in completions]
    return make_group(prompt, completions, texts, await LengthReward().score(prompt, texts), 0.0)


async def plain_loop(config: RunConfig, rank: PolicyRank) -> list[tuple[float, ...]]:
    """Synchronous training without any of our parts in between: sample a batch, learn from it, next version."""
    rig, engine, count, reports = Rig(config), FakeEngine(**STUB), config.required_samples, []
    for step in range(config.trainer.steps):
        groups = [await sample(rig, engine, uid) for uid in range(step * count, (step + 1) * count)]
        size = config.trainer.ppo_mini_batch_size
        for start in range(0, count, size):
            reports.append(numbers(learn(rank, groups[start : start + size], config.trainer.micro_batch_tokens, step)))
        await engine.update_weights(WeightUpdate(step + 1, "", 0), "keep")
    return reports


def learn(rank: PolicyRank, groups: list[Group], tokens: int, version: int) -> dict[str, float]:
    """One optimizer step."""
    advantages, rows = estimate(rank.algorithm, groups), list[PackedRow]()
    for index, (group, advantage) in enumerate(zip(groups, advantages, strict=True)):
        rows += pack_group(group, advantage, tokens, first=index * len(group.rollouts))
    return rank.update(micro_batches(rows, tokens, 1)[0], step_denominator(groups, "token"), version)


def same_parameters(left: PolicyRank, right: PolicyRank) -> bool:
    return all(torch.equal(value, right.parameters[name]) for name, value in left.parameters.items())


@pytest.mark.parametrize("bound", ON_POLICY)
async def test_on_policy_has_the_losses_of_a_plain_synchronous_loop_bit_for_bit(
    bound: dict[str, Any], ascii_llama: Path
) -> None:
    config = run_config(asynchrony=bound, rollout={"group_size": 4}, trainer={"steps": STEPS})
    by_hand, ours = make_rank(ascii_llama), make_rank(ascii_llama)
    expected = await plain_loop(config, by_hand)
    loop = Loop(Rig(config, engines=[FakeEngine(token_delay_s=0.001, **STUB)]), InProcess(ours))
    await loop.fit()
    assert [numbers(metrics) for metrics in loop.metrics] == expected
    assert len({report[0] for report in expected}) == STEPS  # there was something to learn
    assert same_parameters(ours, by_hand)
    assert loop.position.max_age == 0


@pytest.mark.parametrize("old", ["rollout", "version_start"])
async def test_a_step_of_several_mini_batches_makes_an_optimizer_step_with_each(old: str, ascii_llama: Path) -> None:
    config = run_config(
        asynchrony={"max_staleness": 0, "require_batches": 3},
        rollout={"group_size": 4},
        trainer={"steps": 2, "ppo_mini_batch_size": 2},
        algorithm={"old_log_prob": old},
    )
    by_hand, ours = (make_rank(ascii_llama, config.algorithm, steps_per_version=3) for _ in range(2))
    expected = await plain_loop(config, by_hand)
    loop = Loop(Rig(config, engines=[FakeEngine(**STUB)]), InProcess(ours))
    await loop.fit()
    assert (loop.position.step, loop.position.version, ours.updates, len(expected)) == (2, 2, 6, 6)
    assert same_parameters(ours, by_hand)
    losses = [sum(report[0] for report in expected[step : step + 3]) / 3 for step in (0, 3)]
    assert [metrics["loss/policy"] for metrics in loop.metrics] == pytest.approx(losses)
    assert loop.metrics[0]["groups/count"] == config.required_samples == 6


def test_a_rank_counts_the_optimizer_steps_of_a_version(ascii_llama: Path) -> None:
    asynchrony = {"require_batches": 3, "trigger_parameter_sync_step": 2}
    rank = RankActor(run_config(asynchrony=asynchrony), str(ascii_llama), 0, None)
    rank.load(None)
    assert rank.policy.start.steps == 6
    rank.policy.close()


@pytest.mark.parametrize("asynchrony", [{}, {"trigger_parameter_sync_step": 2, "require_batches": 2}])
def test_without_stale_tokens_mask_has_the_losses_of_pace_bit_for_bit(
    asynchrony: dict[str, Any], ascii_llama: Path
) -> None:
    async def run(strategy: str) -> Loop:
        config = run_config(
            asynchrony={"max_staleness": 4, "staleness_strategy": strategy, **asynchrony},
            rollout={"group_size": 4},
            trainer={"steps": STEPS, "ppo_mini_batch_size": 2},
        )
        rank = make_rank(ascii_llama, steps_per_version=config.updates_per_version)
        loop = Loop(Rig(config, engines=[FakeEngine(token_delay_s=0.1, **STUB)]), InProcess(rank))
        await loop.fit()
        return loop

    loops = []
    for strategy in ("pace", "mask"):
        with asyncio.Runner(loop_factory=OwnTime) as runner:  # the same moments in both
            loops.append(runner.run(run(strategy)))
    pace, mask = loops
    assert [numbers(metrics) for metrics in mask.metrics] == [numbers(metrics) for metrics in pace.metrics]
    assert same_parameters(mask.ranks.policy, pace.ranks.policy)
    assert [metrics["staleness/masked_tokens"] for metrics in mask.metrics] == [0] * STEPS
    assert max(metrics["staleness/partial_span_max"] for metrics in mask.metrics) > 0


class PowerCut(Exception):
    pass


async def cut_after(steps: int, config: RunConfig, folder: Path, rank: PolicyRank) -> tuple[Loop, Mapping[str, Any]]:
    """A run that commits after every step and dies in the step after `steps`; what was committed last."""
    committed: dict[str, Any] = {}
    loop = Loop(Rig(config, engines=[FakeEngine(**STUB)]), InProcess(rank))

    async def commit(position: Position) -> None:
        committed["ledger"] = json.loads(json.dumps(await loop.rig.rollouter.ledger_state()))
        committed["position"] = Position(position.step, position.version, position.groups)
        rank.save_state(folder)

    async def die() -> None:
        if loop.position.step == steps:
            raise PowerCut

    loop.trainer.commit, loop.before_step = commit, die
    with pytest.raises(ExceptionGroup) as failure:
        await loop.fit()
    assert failure.group_contains(PowerCut)
    return loop, committed


@pytest.mark.parametrize("cut", [1, 3])
async def test_a_resumed_run_has_the_losses_of_an_uninterrupted_run(
    cut: int, ascii_llama: Path, tmp_path: Path
) -> None:
    config = run_config(
        asynchrony={"max_staleness": 0}, rollout={"group_size": 4}, trainer={"steps": STEPS}, checkpoint={"every": 1}
    )
    whole_rank, rank = make_rank(ascii_llama), make_rank(ascii_llama)
    whole = Loop(Rig(config, engines=[FakeEngine(**STUB)]), InProcess(whole_rank))
    await whole.fit()
    before, committed = await cut_after(cut, config, tmp_path, make_rank(ascii_llama))
    position: Position = committed["position"]
    rank.load_state(tmp_path)
    engine = FakeEngine(**STUB)
    await engine.update_weights(WeightUpdate(position.version, "", 0), "keep")
    rig = Rig(config, engines=[engine], state=committed["ledger"], version=position.version)
    after = Loop(rig, InProcess(rank), position)
    await after.fit()
    steps = [len(before.metrics), len(after.metrics)]
    assert steps == [cut, STEPS - cut]
    resumed = [numbers(metrics) for metrics in [*before.metrics, *after.metrics]]
    assert resumed == [numbers(metrics) for metrics in whole.metrics]
    assert same_parameters(rank, whole_rank)
