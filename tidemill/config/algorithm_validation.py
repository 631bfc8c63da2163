"""Checks that the settings of the algorithm fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.config.algorithm import COMPARED, DISCOUNTED, AlgorithmConfig
from tidemill.config.run import RunConfig
from tidemill.config.section import default, is_set
from tidemill.errors import ConfigError, in_yaml

NEEDS: Sequence[tuple[str, str, Sequence[Any]]] = (
    ("normalize_std", "adv_estimator", ("grpo",)),
    ("pass_k", "adv_estimator", ("pass_at_k",)),
    ("gamma", "adv_estimator", DISCOUNTED),
    ("proximal", "old_log_prob", ("decoupled",)),
    ("behaviour_cap", "old_log_prob", ("decoupled",)),
)
"""Settings of `algorithm` that have an effect only with some values of another one."""


def algorithm_mistakes(config: RunConfig) -> Iterator[ConfigError]:
    """Settings of the algorithm without effect, and groups that it cannot learn from."""
    algorithm, size = config.algorithm, config.rollout.group_size
    for name, other, values in NEEDS:
        if is_set(algorithm, name) and value_of(algorithm, other) not in values:
            words = " or ".join(in_yaml(value) for value in values)
            allowed = f"{in_yaml(default(algorithm, name))} unless algorithm.{other} is {words}"
            fix = f"Set algorithm.{other} to {words}, or leave this out."
            yield ConfigError(f"algorithm.{name}", value_of(algorithm, name), allowed, fix)
    if size == 1 and algorithm.adv_estimator in COMPARED:
        allowed = f"at least 2 with algorithm.adv_estimator = {algorithm.adv_estimator}, which compares responses"
        yield ConfigError("rollout.group_size", 1, allowed, "Raise it, or use reinforce or reinforce_plus_plus.")
    if algorithm.adv_estimator == "pass_at_k" and algorithm.pass_k > size:
        allowed = f"at most rollout.group_size = {size}"
        yield ConfigError("algorithm.pass_k", algorithm.pass_k, allowed, "Lower it, or raise rollout.group_size.")


def value_of(algorithm: AlgorithmConfig, name: str) -> Any:
    return algorithm.model_dump()[name]


def clips_without_effect(config: RunConfig) -> Iterator[str]:
    """Clips of a ratio that is always 1."""
    if config.algorithm.old_log_prob == "rollout" or config.updates_per_version > 1:
        return
    for name in ("clip_ratio_low", "clip_ratio_high", "dual_clip"):
        if is_set(config.algorithm, name):
            yield (
                f"algorithm.{name} = {in_yaml(config.algorithm.model_dump()[name])} has no effect: with "
                f"algorithm.old_log_prob = {config.algorithm.old_log_prob} and one optimizer step for each policy "
                "version the ratio is 1"
            )
