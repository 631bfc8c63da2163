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
from tidemill.train.batch import step_denominator
from tidemill.train.world import World

DEADLINE_S = 120
STEPS = 2
# Small, because Adam turns the rounding of a gradient near zero into a step of this size.
LEARNING_RATE = 2e-5


def step_data(step: int) -> tuple[list[Group], list[Float32Array], float]:
    """The second step has one group, so that one of two ranks has nothing to do."""
    groups = random_groups(5 if step == 0 else 1, seed=step)
    return groups, random_advantages(groups, seed=step), step_denominator(groups, "token")


def train_rank(folder: str, out: str, rank: int, world: int, port: int) -> None:
    """What a process runs; the last step has no target on any rank."""
    meeting = f"tcp://127.0.0.1:{port}"
    policy = make_rank(Path(folder), world=World(rank, world, meeting), learning_rate=LEARNING_RATE)
    norms = []
    for step in range(STEPS):
        groups, advantages, denominator = step_data(step)
        shares = batches_of(groups, advantages, 1 << 10, world)
        norms.append(policy.update(shares[rank], denominator)["grad_norm"])
    assert policy.update([], 5.0)["skipped"] == 1
    policy.export(Path(out) / f"rank{rank}", torch.float32)
    Path(out, f"rank{rank}.json").write_text(json.dumps(norms))
    policy.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_ranks_update_as_one_does(llama: Path, tmp_path: Path) -> None:
    port = free_port()
    code = "import sys; from test_ranks import train_rank as t; t(*sys.argv[1:3], *map(int, sys.argv[3:]))"
    argv = [sys.executable, "-c", code, str(llama), str(tmp_path)]
    processes = [subprocess.Popen([*argv, str(r), "2", str(port)], cwd=Path(__file__).parent) for r in range(2)]
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    alone, norms = make_rank(llama, learning_rate=LEARNING_RATE), []
    for step in range(STEPS):
        groups, advantages, denominator = step_data(step)
        norms.append(alone.update(batches_of(groups, advantages, 1 << 10)[0], denominator)["grad_norm"])
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == pytest.approx(norms, rel=1e-5)
    first, second = (load_file(tmp_path / f"rank{rank}") for rank in range(2))
    for name, parameter in alone.parameters.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.detach(), rtol=0, atol=1e-6)
