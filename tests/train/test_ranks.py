"""Two ranks in processes of their own compute what one rank computes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_rig import batches_of, make_rank, random_advantages, random_groups

from tidemill.records import Float32Array, Group
from tidemill.sections import AlgorithmConfig
from tidemill.train.batch import step_denominator
from tidemill.train.policy import PolicyRank
from tidemill.train.world import World

DEADLINE_S = 120
STEPS = 2
ALGORITHMS = {
    "rollout": AlgorithmConfig(),
    "decoupled": AlgorithmConfig(old_log_prob="decoupled", behaviour_cap=1.5),
}
# Small, because Adam turns the rounding of a gradient near zero into a step of this size.
LEARNING_RATE = 2e-5


def step_data(step: int) -> tuple[list[Group], list[Float32Array], float]:
    """The second step has one group, so that one of two ranks has nothing to do."""
    groups = random_groups(5 if step == 0 else 1, seed=step)
    return groups, random_advantages(groups, seed=step), step_denominator(groups, "token")


def make_policy(folder: Path, name: str, world: World) -> PolicyRank:
    """All steps belong to one version, so that the second one needs the old log-probs."""
    settings = {"steps_per_version": STEPS + 1, "learning_rate": LEARNING_RATE}
    return make_rank(folder, ALGORITHMS[name], world=world, **settings)


def train(policy: PolicyRank) -> list[dict[str, float]]:
    """What the steps report, without times."""
    reports = []
    for step in range(STEPS):
        groups, advantages, denominator = step_data(step)
        share = batches_of(groups, advantages, 1 << 10, policy.world.size)[policy.world.rank]
        report = policy.update(share, denominator)
        reports.append({name: value for name, value in report.items() if not name.startswith("time/")})
    return reports


def train_rank(folder: str, out: str, name: str, rank: int, size: int, port: int) -> None:
    """What a process runs; the last step has no target on any rank."""
    policy = make_policy(Path(folder), name, World(rank, size, f"tcp://127.0.0.1:{port}"))
    reports = train(policy)
    assert policy.update([], 5.0)["skipped"] == 1
    policy.export(Path(out) / f"rank{rank}", torch.float32)
    Path(out, f"rank{rank}.json").write_text(json.dumps(reports))
    policy.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_update_as_one_does(llama: Path, tmp_path: Path, name: str) -> None:
    port = free_port()
    code = "import sys; from test_ranks import train_rank as t; t(*sys.argv[1:4], *map(int, sys.argv[4:]))"
    argv = [sys.executable, "-c", code, str(llama), str(tmp_path), name]
    processes = [subprocess.Popen([*argv, str(r), "2", str(port)], cwd=Path(__file__).parent) for r in range(2)]
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    alone = make_policy(llama, name, World())
    reports = train(alone)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == [pytest.approx(report, rel=1e-4, abs=1e-6) for report in reports]
    first, second = (load_file(tmp_path / f"rank{rank}") for rank in range(2))
    for parameter_name, parameter in alone.parameters.items():
        assert torch.equal(first[parameter_name], second[parameter_name])
        torch.testing.assert_close(first[parameter_name], parameter.detach(), rtol=0, atol=1e-6)
