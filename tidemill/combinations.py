"""Settings that are fine alone and impossible together, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config import RunConfig


def mistakes(config: RunConfig) -> Iterator[ConfigError]:
    """Everything that cannot work, before anything starts."""
    yield from amounts(config)
    yield from staleness(config)
    yield from interruptions(config)
    yield from decoupled(config)
    yield from held_out(config)


def amounts(config: RunConfig) -> Iterator[ConfigError]:
    """Numbers of groups that do not fit each other."""
    needed, capacity, total = config.required_samples, config.queue.capacity, config.rollout.total_rollout_steps
    if capacity is not None and capacity < needed:
        yield ConfigError(
            "queue.capacity",
            capacity,
            f"at least the {needed} groups that one optimizer step waits for",
            "Raise it, or lower trainer.ppo_mini_batch_size or asynchrony.require_batches.",
        )
    if total is not None and total < needed:
        yield too_few_rollouts(total, needed)
    if total is not None and total // needed != config.trainer.steps:
        yield ConfigError(
            "trainer.steps",
            config.trainer.steps,
            f"{total // needed}, the steps that rollout.total_rollout_steps = {total} groups fill, {needed} each",
            "Give one of the two.",
        )


def too_few_rollouts(total: int, needed: int) -> ConfigError:
    """So few groups fill no optimizer step."""
    return ConfigError(
        "rollout.total_rollout_steps",
        total,
        f"at least the {needed} groups of one optimizer step",
        "Raise it, or lower trainer.ppo_mini_batch_size or asynchrony.require_batches.",
    )


def staleness(config: RunConfig) -> Iterator[ConfigError]:
    """Bounds that leave nothing of each other."""
    a = config.asynchrony
    if a.max_staleness == 0 and a.staleness_threshold:
        yield ConfigError(
            "asynchrony.staleness_threshold",
            a.staleness_threshold,
            "0 or null with asynchrony.max_staleness = 0, which lets no group wait for the next version",
            "Raise asynchrony.max_staleness, or leave the threshold out.",
        )
    if config.synchronous and a.staleness_strategy == "drop":
        yield ConfigError(
            "asynchrony.staleness_strategy",
            a.staleness_strategy,
            "pace or wait where the staleness bound is 0: whatever ran ahead would be dropped",
            "Raise asynchrony.max_staleness and asynchrony.staleness_threshold, or pace.",
        )


def interruptions(config: RunConfig) -> Iterator[ConfigError]:
    """Partial rollouts that nothing can make, or that contradict the pause mode."""
    a = config.asynchrony
    if a.partial_rollout and config.synchronous:
        key = "max_staleness" if a.max_staleness == 0 else "staleness_threshold"
        yield ConfigError(
            "asynchrony.partial_rollout",
            True,
            f"false or null with asynchrony.{key} = 0: no group is in flight at a weight sync",
            f"Raise asynchrony.{key}, or leave partial rollouts out.",
        )
    if a.partial_rollout is not None and a.pause_mode is not None and a.partial_rollout == (a.pause_mode == "wait"):
        allowed = "keep or abort with" if a.partial_rollout else "wait without"
        yield ConfigError(
            "asynchrony.pause_mode",
            a.pause_mode,
            f"{allowed} partial rollouts (asynchrony.partial_rollout = {a.partial_rollout})",
            "Leave one of the two out.",
        )


def decoupled(config: RunConfig) -> Iterator[ConfigError]:
    """Settings of the decoupled loss without it."""
    algorithm, defaults = config.algorithm, type(config.algorithm)()
    if algorithm.old_log_prob == "decoupled":
        return
    for key, value, default in (
        ("proximal", algorithm.proximal, defaults.proximal),
        ("behaviour_cap", algorithm.behaviour_cap, defaults.behaviour_cap),
    ):
        if value != default:
            allowed = f"{default!r} unless algorithm.old_log_prob is decoupled"
            fix = "Set algorithm.old_log_prob to decoupled, or leave this out."
            yield ConfigError(f"algorithm.{key}", value, allowed, fix)


def held_out(config: RunConfig) -> Iterator[ConfigError]:
    """Scores without prompts to score on."""
    wanted = {"evaluation.every": config.evaluation.every or None, "registry.min_score": config.registry.min_score}
    for key, value in wanted.items():
        if value is not None and config.data.held_out is None:
            allowed = f"{0 if key == 'evaluation.every' else 'null'} without data.held_out"
            yield ConfigError(key, value, allowed, "Name a held-out file.")
