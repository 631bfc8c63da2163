"""Checks that the settings of the algorithm fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.config.algorithm import COMPARED, DISCOUNTED, AlgorithmConfig
from tidemill.config.run import RunConfig
from tidemill.config.section import default, is_set
from tidemill.errors import ConfigError, in_yaml

CLIPPED = ("ppo_clip", "gspo", "gspo_token", "cispo", "icepop", "dppo_tv", "dppo_kl")
NEEDS: Sequence[tuple[str, str, Sequence[Any]]] = (
    ("normalize_std", "adv_estimator", ("grpo",)),
    ("pass_k", "adv_estimator", ("pass_at_k",)),
    ("gamma", "adv_estimator", DISCOUNTED),
    ("proximal", "old_log_prob", ("decoupled",)),
    ("clip_ratio_low", "loss_mode", CLIPPED),
    ("clip_ratio_high", "loss_mode", CLIPPED),
    ("dual_clip", "loss_mode", ("ppo_clip",)),
    ("tau_pos", "loss_mode", ("sapo",)),
    ("tau_neg", "loss_mode", ("sapo",)),
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
    yield from correction_mistakes(algorithm)
    if is_set(algorithm, "kl_loss_type") and not algorithm.kl_loss_coef:
        fix = "Set algorithm.kl_loss_coef, or leave this out."
        allowed = f"{default(algorithm, 'kl_loss_type')} with algorithm.kl_loss_coef = 0"
        yield ConfigError("algorithm.kl_loss_type", algorithm.kl_loss_type, allowed, fix)
    if size == 1 and algorithm.adv_estimator in COMPARED:
        allowed = f"at least 2 with algorithm.adv_estimator = {algorithm.adv_estimator}, which compares responses"
        yield ConfigError("rollout.group_size", 1, allowed, "Raise it, or use reinforce or reinforce_plus_plus.")
    if algorithm.adv_estimator == "pass_at_k" and algorithm.pass_k > size:
        allowed = f"at most rollout.group_size = {size}"
        yield ConfigError("algorithm.pass_k", algorithm.pass_k, allowed, "Lower it, or raise rollout.group_size.")


def correction_mistakes(algorithm: AlgorithmConfig) -> Iterator[ConfigError]:
    """Settings of the rollout correction without effect, and one probability ratio that is applied twice."""
    correction = algorithm.rollout_correction
    for name, needed, there in (
        ("rollout_is_threshold", "rollout_is", algorithm.importance_sampling),
        ("rollout_is_batch_normalize", "rollout_is", algorithm.importance_sampling),
        ("rollout_is_threshold_lower", "rollout_is", algorithm.importance_sampling),
        ("rollout_rs_threshold", "rollout_rs", correction.rollout_rs),
        ("rollout_rs_threshold_lower", "rollout_rs", correction.rollout_rs),
    ):
        if is_set(correction, name) and there is None:
            allowed = f"{in_yaml(default(correction, name))} unless algorithm.rollout_correction.{needed} is set"
            fix = f"Set algorithm.rollout_correction.{needed}, or leave this out."
            yield ConfigError(f"algorithm.rollout_correction.{name}", correction.model_dump()[name], allowed, fix)
    for kind in ("is", "rs"):
        name, upper = f"rollout_{kind}_threshold_lower", f"rollout_{kind}_threshold"
        bounds = correction.model_dump()
        if (bounds[name] or 0) >= (bounds[upper] or math.inf):
            allowed = f"less than algorithm.rollout_correction.{upper} = {bounds[upper]:g}"
            yield ConfigError(f"algorithm.rollout_correction.{name}", bounds[name], allowed, "Change one of the two.")
    if correction.rollout_is and algorithm.old_log_prob == "rollout" and algorithm.loss_mode != "policy_gradient":
        allowed = (
            f"null with algorithm.old_log_prob = rollout and algorithm.loss_mode = {algorithm.loss_mode}, whose ratio "
            "is the importance weight already"
        )
        fix = "Set algorithm.old_log_prob to decoupled, or algorithm.loss_mode to policy_gradient, or leave this out."
        yield ConfigError("algorithm.rollout_correction.rollout_is", correction.rollout_is, allowed, fix)


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
