"""Where Ray places the actors of a run, and how many GPUs they take.

On this machine, or on an existing cluster, Ray places them anywhere. In the pods of `cluster.provider: kuberay` they
request resources that only the pods of their group have, so that the head stays empty:

    trainer pods    ranks; queue, rollouter and rewards
    rollout pods    one engine each
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.cluster.local import cluster_resources
from tidemill.config.names import ROLLOUT_RESOURCE, SERVICE_RESOURCE, TRAINER_RESOURCE
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError

POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Placement:
    """What an actor requests from the cluster."""

    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def options(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Options of a Ray actor, with environment variables of its process."""
        variables = {"runtime_env": {"env_vars": dict(environment)}} if environment else {}
        return {"num_cpus": 0, "num_gpus": self.gpus, "resources": dict(self.resources), **variables}


ANYWHERE = Placement()


def engine_placement(config: RunConfig) -> Placement:
    return placement(config, ROLLOUT_RESOURCE, config.rollout.tensor_parallel_size)


def rank_placement(config: RunConfig) -> Placement:
    return placement(config, TRAINER_RESOURCE, 1)


def service_placement(config: RunConfig) -> Placement:
    return placement(config, SERVICE_RESOURCE, 0)


def placement(config: RunConfig, resource: str, gpus: int) -> Placement:
    """One unit of a resource and some GPUs; outside of pods no resource, and no GPUs where the cluster has none."""
    if config.cluster.provider == "kuberay":
        return Placement(gpus if config.kubernetes.gpu_resource else 0, {resource: 1.0})
    return Placement(gpus if gpus and cluster_resources().get("GPU") else 0)


def has_own_pods(config: RunConfig) -> bool:
    """Whether the actors run in pods of their own, which share no disk with the driver."""
    return config.cluster.provider == "kuberay"


async def wait_for_pods(config: RunConfig, announce: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Wait until all pods that the run starts with have joined the cluster: they start after its head.

    Raises:
        RunError: not within `kubernetes.start_timeout_s`.
    """
    if not has_own_pods(config):
        return
    limit = config.kubernetes.start_timeout_s
    deadline, said = time.monotonic() + limit, ""
    while missing := shortage(demand(config), cluster_resources()):
        if time.monotonic() > deadline:
            raise RunError(
                f"the cluster was not complete within kubernetes.start_timeout_s = {limit} s: {missing}. Look at the "
                "events of its pods: no room, no such node, or an image that cannot be pulled"
            )
        if missing != said:
            announce(f"wait for pods: {missing}")
            said = missing
        await asyncio.sleep(poll_s)


def check_gpus(config: RunConfig) -> None:
    """Refuse a cluster with fewer GPUs than the run needs, where an actor would wait for ever."""
    rollout, there = config.rollout, int(cluster_resources().get("GPU", 0))
    needed = rollout.engines * rollout.tensor_parallel_size + config.trainer.ranks
    if 0 < there < needed:
        allowed = (
            f"a number for which {there} GPUs suffice: every engine takes rollout.tensor_parallel_size = "
            f"{rollout.tensor_parallel_size}, each of trainer.ranks = {config.trainer.ranks} one, {needed} in all"
        )
        fix = "Run on more GPUs, or lower one of the three; an engine and a trainer rank never share a GPU."
        raise ConfigError("rollout.engines", rollout.engines, allowed, fix)


def check_hosts(config: RunConfig, hosts: Collection[str]) -> None:
    """Refuse settings that work on one host only on an existing cluster of several.

    Args:
        config: of the run.
        hosts: names of the hosts of the cluster.

    Raises:
        ConfigError: weights or checkpoints would not reach another host.
    """
    if config.cluster.provider != "existing" or len(hosts) < 2:
        return
    for key, value, refused, allowed in (
        ("sync.transport", config.sync.transport, "shared_memory", "object_store"),
        ("store.endpoint", config.store.endpoint, "embedded", "the http(s)://host:port of an S3 server"),
    ):
        if value == refused:
            fix = f"Ray may place engines and trainer on different hosts: {', '.join(sorted(hosts))}."
            raise ConfigError(key, value, f"{allowed} on a Ray cluster of {len(hosts)} hosts", fix)


def demand(config: RunConfig) -> dict[str, float]:
    engines, ranks = config.rollout.engines, config.trainer.ranks
    needed: dict[str, float] = {TRAINER_RESOURCE: ranks, ROLLOUT_RESOURCE: engines, SERVICE_RESOURCE: 1}
    if config.kubernetes.gpu_resource:
        needed["GPU"] = ranks + engines * config.rollout.tensor_parallel_size
    return needed


def shortage(needed: Mapping[str, float], there: Mapping[str, float]) -> str:
    lacking = {name: there.get(name, 0.0) for name, number in needed.items() if there.get(name, 0.0) < number}
    return ", ".join(f"{number:g} of {needed[name]:g} {name}" for name, number in lacking.items())
