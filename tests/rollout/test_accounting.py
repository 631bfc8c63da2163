"""What the books say of groups that came to nothing, and of those that several versions sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_rig import BROKEN, LengthReward, Rig, run_config

from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling
from tidemill.records import Completion, Int32Array
from tidemill.rollout import in_flight as flights

pytestmark = pytest.mark.own_time


class Unreliable(FakeEngine):
    """Ends the first request for occurrence 2 too early, and takes too long over occurrence 3."""

    def __init__(self) -> None:
        super().__init__(token_delay_s=0.005)

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        uid = int(request_id.partition(".")[0])
        self._lengths = (500, 500) if uid == 3 else (4, 4)  # read before anything is awaited
        completions = await super().generate(request_id, prompt_ids, sampling)
        first = [name for name, _ in self.requests if name.startswith("2.")] == [request_id]
        return [replace(c, finish_reason="abort") for c in completions] if first else completions


async def test_what_failures_cost_is_counted_as_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "ANSWER_TIMEOUT_S", 30.0)
    rollout = {"max_new_tokens": 500, "group_timeout_s": 1.0, "max_attempts": 2}
    config = run_config(rollout=rollout, asynchrony={"max_staleness": 0})
    rig = Rig(config, engines=[Unreliable()], rewards=LengthReward({1: BROKEN}))
    assert await rig.run() == 5
    assert rig.ledger.quarantined.items() >= {1: "reward_error", 3: "timeout"}.items()
    assert rig.ledger.counts()["dropped/aborted"] == 1
    sampled = (await rig.engines[0].stats())["generated_tokens"]
    trained = sum(group.response_tokens for group in rig.trained)
    assert (await rig.rollouter.stats())["wasted_tokens"] == sampled - trained > 2 * 2 * 4 + 2 * 4


@pytest.mark.parametrize(("bound", "seeded"), [(0, True), (1, False)])
async def test_only_a_run_that_can_be_reproduced_is_seeded(bound: int, seeded: bool) -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": bound}))
    await rig.run()
    seeds = [sampling.seed for _, sampling in rig.engines[0].requests]
    assert (len(set(seeds)), None in seeds) == ((20, False) if seeded else (1, True))
