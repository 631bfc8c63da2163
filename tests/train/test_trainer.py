"""The trainer's loop over the real rollouter and queue, with ranks that only count."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from rollout_rig import LengthReward, Rig, run_config
from train_rig import spread

from tidemill.config.run import RunConfig
from tidemill.errors import RunError
from tidemill.observe.meters import Timings
from tidemill.observe.metrics import MetricsAggregator
from tidemill.protocols import Evaluation, Loads, PauseMode, WeightUpdate
from tidemill.records import Completion, EngineId, Group, Prompt, Rollout, VersionSpan
from tidemill.rollout.group_request import make_group
from tidemill.train.batch import MicroBatch
from tidemill.train.trainer import Metrics, Position, Trainer

pytestmark = pytest.mark.own_time


@dataclass
class CountingRanks:
    """Remembers the versions that the steps train."""

    versions: list[int] = field(default_factory=list)

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        self.versions.append(version)
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "tokens": 3.0, "ratio/mean": 1.0}


@dataclass
class Engines:
    """Publishes to the fake engines of a rig."""

    rig: Rig
    versions: list[int] = field(default_factory=list)

    async def publish(self, version: int, mode: PauseMode, exported: Callable[[], None]) -> Mapping[str, float]:
        exported()
        for engine in self.rig.engines:
            await engine.update_weights(WeightUpdate(version, "", 0), mode)
        self.versions.append(version)
        return {"time/sync_adopt": 0.0}


@dataclass
class Notes:
    """Keeps what the trainer reports."""

    steps: list[Metrics] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    activities: list[tuple[int, list[str], Loads]] = field(default_factory=list)
    syncs: list[tuple[int, Metrics]] = field(default_factory=list)

    def synced(self, step: int, metrics: Metrics) -> None:
        self.syncs.append((step, metrics))

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        self.steps.append(metrics)

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        self.activities.append((step, [name for name, _, _ in timings.dated(0.0)], loads))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        raise AssertionError("nothing asks for an evaluation here")

    def notice(self, text: str) -> None:
        self.notices.append(text)


def make_trainer(rig: Rig, position: Position | None = None) -> Trainer:
    return Trainer(
        rig.config,
        rig.queue,
        rig.rollouter,
        CountingRanks(),
        Engines(rig),
        Notes(),
        position=position or Position(),
    )


async def fit(trainer: Trainer, rig: Rig) -> None:
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.rollouter.run())
        await trainer.fit()
        await rig.rollouter.stop()


async def test_every_step_consumes_a_full_batch_and_publishes_the_next_version() -> None:
    rig = Rig()
    trainer = make_trainer(rig)
    await fit(trainer, rig)
    assert trainer.position.step == trainer.position.version == 5
    assert trainer.fleet.versions == [1, 2, 3, 4, 5]
    assert trainer.position.groups == rig.ledger.trained_count == rig.queue.trained == 20
    assert rig.queue.leases == {}  # all acknowledged


async def test_what_trainer_and_engines_did_is_reported_after_every_step() -> None:
    rig = Rig()
    trainer = make_trainer(rig)
    await fit(trainer, rig)
    activities = trainer.observer.activities
    assert [step for step, _, _ in activities] == [1, 2, 3, 4, 5]
    assert all({"get_groups", "update_actor", "sync", "step"} <= set(names) for _, names, _ in activities)
    assert all("adopt" in names for _, names, _ in activities[1:])
    seen = {engine for _, _, loads in activities for engine in loads}
    assert seen == {EngineId(index) for index in range(len(rig.engines))}


async def test_weights_are_synced_every_trigger_steps() -> None:
    config = run_config(asynchrony={"trigger_parameter_sync_step": 2}, trainer={"steps": 4})
    trainer = make_trainer(rig := Rig(config))
    await fit(trainer, rig)
    assert (trainer.position.step, trainer.fleet.versions) == (4, [1, 2])
    assert trainer.ranks.versions == [0, 0, 1, 1]


@pytest.mark.parametrize("bound", [0, 1, 3])
async def test_no_trained_token_is_older_than_the_bound(bound: int) -> None:
    trainer = make_trainer(rig := Rig(run_config(asynchrony={"max_staleness": bound}, trainer={"steps": 8})))
    await fit(trainer, rig)
    assert max(metrics["staleness/max"] for metrics in trainer.observer.steps) == trainer.position.max_age <= bound


async def test_a_group_that_breaks_the_bound_ends_the_run() -> None:
    trainer = make_trainer(rig := Rig(), Position(version=3))
    with pytest.raises(RunError, match=r"age 3 at version 3, allowed is 0\.\.1"):
        trainer.check_age([await one_group(rig.config)])


@pytest.mark.parametrize(("kl_loss_coef", "rows"), [(0.0, 0), (0.5, 1)])
async def test_groups_without_advantage_are_packed_only_for_a_kl_penalty(kl_loss_coef: float, rows: int) -> None:
    trainer = make_trainer(rig := Rig(run_config(algorithm={"kl_loss_coef": kl_loss_coef})))
    group = await one_group(rig.config)
    assert len(trainer.pack([group], [spread(group, [0, 0])])) == rows


async def test_every_nth_version_is_committed_except_the_last_one() -> None:
    config = run_config(trainer={"steps": 6}, checkpoint={"every": 2})
    trainer, committed = make_trainer(rig := Rig(config)), list[tuple[int, int]]()

    async def commit(position: Position) -> None:
        committed.append((position.version, rig.ledger.trained_count))

    trainer.commit = commit
    await fit(trainer, rig)
    assert committed == [(2, 8), (4, 16)]


async def test_a_commit_counts_the_seconds_of_its_own_step() -> None:
    config = run_config(trainer={"steps": 3}, checkpoint={"every": 1})
    trainer, committed = make_trainer(rig := Rig(config)), list[float]()

    async def commit(position: Position) -> None:
        committed.append(position.seconds)

    trainer.commit = commit
    await fit(trainer, rig)
    first, second, third = trainer.observer.steps
    for seconds, before, metrics in ((committed[0], 0.0, first), (committed[1], first["time/step"], second)):
        spent = sum(metrics[f"time/{phase}"] for phase in ("get_groups", "update_actor", "sync"))
        assert before + spent <= seconds <= before + metrics["time/step"]
    assert trainer.position.seconds == pytest.approx(sum(m["time/step"] for m in (first, second, third)))


async def test_the_largest_age_is_that_of_the_oldest_token_of_all_steps() -> None:
    trainer = make_trainer(Rig(), Position(version=5))
    for spans in ((VersionSpan(3, 0, 1), VersionSpan(5, 1, 2)), (VersionSpan(4, 0, 2),)):
        completion = Completion(np.zeros(2, np.int32), np.zeros(2, np.float32), spans, "stop")
        prompt = Prompt(0, 0, np.zeros(1, np.int32), "")
        trainer.advance([make_group(prompt, [completion], ["a"], [(1.0, {})], 0.0)])
        assert trainer.position.max_age == 2


async def test_a_group_of_a_future_version_ends_the_run() -> None:
    trainer = make_trainer(rig := Rig(version=1), Position(version=0))
    await rig.engines[0].update_weights(WeightUpdate(1, "", 0), "keep")
    run = asyncio.create_task(rig.rollouter.run())
    lease = await rig.queue.lease(1, 1, 10)
    await rig.rollouter.stop()
    await run
    with pytest.raises(RunError, match=r"age -1 at version 0, allowed is 0\.\.1"):
        trainer.check_age([Group.from_bytes(lease.deliveries[0].payload)])


async def test_stale_groups_of_the_queue_are_issued_again() -> None:
    asynchrony = {"staleness_strategy": "drop"}
    config = run_config(asynchrony=asynchrony, queue={"capacity": 40}, trainer={"steps": 12})
    trainer = make_trainer(rig := Rig(config))
    run = asyncio.create_task(rig.rollouter.run())
    async with asyncio.timeout(30):
        while rig.queue.arrived < 40:  # ten versions' groups, all of the first one
            await asyncio.sleep(0.005)
        await trainer.fit()
    await rig.rollouter.stop()
    await run
    assert rig.queue.swept >= 32
    assert rig.ledger.counts()["dropped/stale"] >= rig.queue.swept
    assert (rig.ledger.trained_count, trainer.position.max_age) == (48, 1)


async def one_group(config: RunConfig) -> Group:
    rig = Rig(config)
    run = asyncio.create_task(rig.rollouter.run())
    lease = await rig.queue.lease(1, 0, 10)
    await rig.rollouter.stop()
    await run
    return Group.from_bytes(lease.deliveries[0].payload)


async def test_the_data_may_end_before_the_last_step_and_the_rest_is_trained() -> None:
    config = run_config(data={"train": "x.jsonl", "epochs": 5}, trainer={"steps": 20})
    trainer = make_trainer(rig := Rig(config, rows=7))
    await fit(trainer, rig)
    assert (trainer.position.step, trainer.position.groups) == (9, 35)
    assert trainer.observer.notices == ["the data ended after step 9"]


async def test_a_missing_batch_is_an_error_with_the_state_of_queue_and_rollouter() -> None:
    config = run_config(trainer={"steps": 1, "ppo_mini_batch_size": 4, "get_timeout_s": 0.2})
    trainer = make_trainer(rig := Rig(config, token_delay_s=5.0))
    with pytest.raises(ExceptionGroup) as failure:
        await fit(trainer, rig)
    assert "trainer.get_timeout_s = 0.2 s" in str(failure.value.exceptions[0])
    assert "generating" in str(failure.value.exceptions[0])


async def test_a_complete_run_makes_no_step_after_a_restart() -> None:
    trainer = make_trainer(rig := Rig(version=5), Position(step=5, version=5))
    await trainer.fit()
    assert trainer.observer.steps == [] and rig.ledger.trained_count == 0


async def test_step_metrics_have_the_documented_names() -> None:
    trainer = make_trainer(rig := Rig(rewards=LengthReward()))
    await fit(trainer, rig)
    table = Path(__file__).parents[2].joinpath("docs/metrics.md").read_text(encoding="utf-8")
    documented = "|".join(
        re.sub("PART|REASON|AGE", "[^/]+", name) for name in re.findall(r"`([a-z_]+/[a-zA-Z_/]+)`", table)
    )
    unknown = [name for name in trainer.observer.steps[0] if not re.fullmatch(documented, name)]
    assert unknown == []
    expected = {"reward/mean", "staleness/max", "queue/depth", "idle/trainer", "idle/rollouter", "loss/policy"}
    assert expected | {"throughput/tokens_per_second", "time/get_groups", "time/step"} <= set(trainer.observer.steps[0])


async def test_the_metrics_of_all_steps_can_be_aggregated() -> None:
    trainer = make_trainer(rig := Rig(rewards=LengthReward()))
    await fit(trainer, rig)
    aggregator = MetricsAggregator()
    for metrics in trainer.observer.steps:
        aggregator.add(metrics)
    run = aggregator.result()
    assert run["groups/count"] == trainer.position.groups
    assert run["response/trained_tokens"] == trainer.position.response_tokens
    assert run["staleness/max"] == trainer.position.max_age
    waiting = sum(metrics["time/get_groups"] for metrics in trainer.observer.steps)
    assert run["idle/trainer"] == pytest.approx(waiting / run["time/step"])
    for metrics in trainer.observer.steps:
        assert metrics["throughput/tokens_per_second"] == metrics["response/trained_tokens"] / metrics["time/step"]
    assert run["throughput/tokens_per_second"] == pytest.approx(run["response/trained_tokens"] / run["time/step"])


async def test_a_step_counts_its_mini_batches_including_a_last_partial_one() -> None:
    config = run_config(
        data={"train": "x.jsonl", "epochs": 1},
        asynchrony={"require_batches": 2},
        trainer={"steps": 20, "ppo_mini_batch_size": 2},
    )
    trainer = make_trainer(rig := Rig(config, rows=9))
    losses = iter([1.0, 2.0, 3.0, 4.0, 10.0])

    async def update(batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int) -> Mapping[str, float]:
        return {"loss": next(losses), "grad_norm": 1.0}

    trainer.ranks.update = update
    await fit(trainer, rig)
    assert [metrics["update/count"] for metrics in trainer.observer.steps] == [2, 2, 1]
    assert [metrics["loss/policy"] for metrics in trainer.observer.steps] == [1.5, 3.5, 10]
    aggregator = MetricsAggregator()
    for metrics in trainer.observer.steps:
        aggregator.add(metrics)
    assert aggregator.result()["loss/policy"] == (1 + 2 + 3 + 4 + 10) / 5


async def test_the_largest_age_of_a_run_is_that_of_its_oldest_token() -> None:
    trainer = make_trainer(Rig(), Position(version=5))
    spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 4))
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    partial = Rollout(np.zeros(4, np.int32), zeros, ones, spans, "stop", "", 0.0, {}, 1.0)
    trainer.advance([Group(Prompt(0, 0, np.zeros(1, np.int32), ""), (partial,))])
    assert (trainer.position.max_age, trainer.position.response_tokens) == (2, 4)


# ---- the end of a run


async def test_the_last_updates_are_synced_if_the_steps_are_not_a_multiple_of_the_trigger() -> None:
    config = run_config(asynchrony={"trigger_parameter_sync_step": 3}, trainer={"steps": 8})
    trainer = make_trainer(rig := Rig(config))
    await fit(trainer, rig)
    assert (trainer.position.step, trainer.position.unsynced, trainer.fleet.versions) == (8, 0, [1, 2, 3])
    assert ["time/sync" in metrics for metrics in trainer.observer.steps] == [False, False, True] * 2 + [False, True]
    assert rig.ledger.trained_count == 32


@dataclass
class StoppingRanks(CountingRanks):
    """Ask for a stop in the middle of a step."""

    trainer: Trainer | None = None
    step: int = 3
    immediate: bool = False

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        assert self.trainer is not None
        if self.trainer.position.step + 1 == self.step:
            self.trainer.stop.ask("the budget is used up", immediate=self.immediate)
            self.trainer.stop.ask("a second reason")
        return await super().update(batches, denominator, version)


async def test_a_stop_ends_the_run_after_the_current_step_with_a_sync() -> None:
    config = run_config(asynchrony={"trigger_parameter_sync_step": 2}, trainer={"steps": 20})
    trainer = make_trainer(rig := Rig(config))
    trainer.ranks = StoppingRanks(trainer=trainer)
    await fit(trainer, rig)
    position = trainer.position
    assert (position.step, position.unsynced, trainer.fleet.versions) == (3, 0, [1, 2])
    assert rig.ledger.trained_count == position.groups == 12
    assert trainer.observer.notices == ["the run is stopped (the budget is used up) after step 3"]
    assert [step for step, _ in trainer.observer.syncs] == [3]  # which no step could report any more


async def test_a_stop_does_not_wait_for_a_batch() -> None:
    config = run_config(trainer={"steps": 1, "get_timeout_s": 1000.0})
    trainer = make_trainer(rig := Rig(config, token_delay_s=100.0))
    asyncio.get_running_loop().call_later(0.1, trainer.stop.ask, "enough")
    await fit(trainer, rig)
    assert (trainer.position.step, rig.ledger.trained_count) == (0, 0)
    assert trainer.observer.notices == ["the run is stopped (enough) after step 0"]


async def test_an_immediate_stop_needs_no_engine_and_the_next_attempt_syncs() -> None:
    config = run_config(trainer={"steps": 5})
    stopped = make_trainer(rig := Rig(config))

    async def update(batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int) -> Mapping[str, float]:
        if stopped.position.step == 1:
            stopped.stop.ask("the pod ends", immediate=True)
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1}

    stopped.ranks.update = update
    await fit(stopped, rig)
    assert (stopped.position.step, stopped.position.unsynced, stopped.fleet.versions) == (2, 1, [1])
    rest = Rig(rig.config, engines=rig.engines, state=rig.ledger.state(), version=1)
    trainer = make_trainer(rest, stopped.position)
    await fit(trainer, rest)
    assert (trainer.position.step, trainer.position.unsynced, trainer.fleet.versions) == (5, 0, [2, 3, 4])


@pytest.mark.parametrize("bound", [{"max_staleness": 0}, {"max_staleness": 1, "staleness_strategy": "wait"}])
async def test_after_an_immediate_stop_within_a_version_a_whole_version_begins_and_nothing_becomes_stale(
    bound: Mapping[str, object],
) -> None:
    config = run_config(asynchrony={**bound, "trigger_parameter_sync_step": 2}, trainer={"steps": 13})
    stopped = make_trainer(rig := Rig(config))
    stopped.ranks = StoppingRanks(trainer=stopped, immediate=True)
    await fit(stopped, rig)
    assert (stopped.position.step, stopped.position.unsynced, stopped.fleet.versions) == (3, 1, [1])
    rest = Rig(config, engines=rig.engines, state=rig.ledger.state(), version=1)
    trainer = make_trainer(rest, stopped.position)
    await fit(trainer, rest)
    assert trainer.ranks.versions == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (trainer.position.step, rest.ledger.trained_count) == (13, 52)
    assert "dropped/stale" not in rest.ledger.counts()  # groups started at the pace of the versions that were trained


async def test_a_stopped_run_resumes_at_its_next_step() -> None:
    stopped = make_trainer(rig := Rig(run_config(trainer={"steps": 5})))
    stopped.ranks = StoppingRanks(trainer=stopped, step=2)
    await fit(stopped, rig)
    rest = Rig(rig.config, engines=rig.engines, state=rig.ledger.state(), version=stopped.position.version)
    trainer = make_trainer(rest, stopped.position)
    await fit(trainer, rest)
    assert (trainer.position.step, rest.ledger.trained_count) == (5, 20)


async def test_the_last_updates_are_synced_if_the_data_ends_before_the_trigger() -> None:
    asynchrony = {"trigger_parameter_sync_step": 3}
    config = run_config(data={"train": "x.jsonl", "epochs": 1}, asynchrony=asynchrony, trainer={"steps": 20})
    trainer = make_trainer(rig := Rig(config, rows=17))
    await fit(trainer, rig)
    assert (trainer.position.step, trainer.position.groups) == (5, 17)
    assert (trainer.position.unsynced, trainer.fleet.versions) == (0, [1, 2])


async def test_a_run_that_ended_between_two_syncs_can_be_extended() -> None:
    short = run_config(asynchrony={"trigger_parameter_sync_step": 2}, trainer={"steps": 3})
    trainer = make_trainer(rig := Rig(short))
    await fit(trainer, rig)
    assert (trainer.position.step, trainer.position.version) == (3, 2)
    config = run_config(asynchrony={"trigger_parameter_sync_step": 2}, trainer={"steps": 8})
    longer = Rig(config, state=await rig.rollouter.ledger_state(), version=2)
    await longer.engines[0].update_weights(WeightUpdate(2, "", 0), "keep")
    again = make_trainer(longer, trainer.position)
    await fit(again, longer)
    assert (again.position.step, again.fleet.versions) == (8, [3, 4, 5])
    assert longer.ledger.trained_count == again.position.groups == 32
    assert again.position.max_age <= 1
    assert "dropped/stale" not in longer.ledger.counts()  # groups started at the pace of the versions that were trained
