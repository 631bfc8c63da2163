"""Settings that would change nothing beside the others: somebody who writes one expects that it does.

One that keeps its default is never refused, so that the settings of a run, written out in full, can be read again; nor
is a limit that is not reached. What depends on the machine is told of when the run starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tidemill.config.asynchrony import AsynchronyConfig, SyncConfig
from tidemill.config.data import DataConfig, RewardConfig
from tidemill.config.kubernetes import KubernetesConfig
from tidemill.config.rollout import EvaluationConfig, RolloutConfig
from tidemill.config.storage import CheckpointConfig, RegistryConfig
from tidemill.config.training import TrainerConfig
from tidemill.errors import ConfigError, in_yaml

ANYTHING = (-math.inf, math.inf)
BOUNDS = {
    "exact_number": (0.0, 1.0),
    "math_verify": (0.0, 1.0),
    "reasoning_gym": (0.0, 1.0),
    "overlong": (-math.inf, 0.0),
}
"""Smallest and largest reward of the functions that are known; see `rollout.rewards`."""

OWN_VARIABLES = frozenset(
    {
        "TIDEMILL_S3_ACCESS_KEY",
        "TIDEMILL_S3_SECRET_KEY",
        "TIDEMILL_CONFIG",
        "TIDEMILL_ATTEMPT",
        "TIDEMILL_KFP_RUN",
    }
)
"""Environment variables of pods whose values do not come from `kubernetes.env`."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Last words of names, such as HF_TOKEN, whose values nobody shall read in settings, manifests and MLflow."""
RUNTIME_ENVIRONMENT = (
    "working_dir",
    "py_modules",
    "pip",
    "uv",
    "conda",
    "env_vars",
    "excludes",
    "py_executable",
    "java_jars",
    "config",
    "container",
    "image_uri",
    "nsight",
    "rocprof_sys",
    "worker_process_setup_hook",
)
"""What Ray reads of a runtime environment; it leaves everything else out with a warning in a log."""


def full_snapshots(sync: SyncConfig) -> Iterator[ConfigError]:
    """How often all weights are stored, where nothing is stored."""
    if sync.transport == "shared_memory" and is_set(sync, "full_every"):
        allowed = f"{default(sync, 'full_every')} with sync.transport = 'shared_memory', which hands over all"
        fix = "Set sync.transport to object_store, or leave this out."
        yield ConfigError("sync.full_every", sync.full_every, allowed, fix)


def scored_prompts(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[ConfigError]:
    """How many of no held-out prompts are scored."""
    if data.held_out is None and evaluation.max_prompts is not None:
        fix = "Name a held-out file."
        yield ConfigError("evaluation.max_prompts", evaluation.max_prompts, "null without data.held_out", fix)


def weights(rewards: Sequence[RewardConfig]) -> Iterator[ConfigError]:
    """Rewards that all count nothing."""
    if not any(reward.weight for reward in rewards):
        fix = "Without one all advantages are 0, and nothing is learned."
        yield ConfigError("rewards.0.weight", rewards[0].weight, "another number than 0 for one reward", fix)


def smallest_score(registry: RegistryConfig, rewards: Sequence[RewardConfig]) -> Iterator[ConfigError]:
    """A score for the registry that no model can have."""
    least, most = registry.min_score, largest_reward(rewards)
    if least is not None and least > most:
        fix = "It is a mean reward, and no percentage."
        yield ConfigError("registry.min_score", least, f"up to {most:g}, the most that the rewards give", fix)


def largest_reward(rewards: Sequence[RewardConfig]) -> float:
    """The largest weighted sum of rewards that is possible; infinite with functions that are not known."""
    return sum(
        max(reward.weight * bound for bound in BOUNDS.get(reward.function, ANYTHING))
        for reward in rewards
        if reward.weight
    )


def gpu_budget(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Hours of GPUs for a run that has none."""
    if kubernetes.gpu_hours is not None and kubernetes.gpu_resource is None:
        fix = "The budget counts GPUs. Limit the time with kubernetes.max_hours."
        allowed = "null with kubernetes.gpu_resource = null, with which a run has no GPU"
        yield ConfigError("kubernetes.gpu_hours", kubernetes.gpu_hours, allowed, fix)


def loose_threshold(asynchrony: AsynchronyConfig) -> Iterator[ConfigError]:
    """A threshold that lets more groups start than the hard bound, which is the one that counts."""
    threshold, most = asynchrony.staleness_threshold, asynchrony.max_staleness
    if threshold is not None and threshold > most > 0 and asynchrony.staleness_strategy != "drop":
        yield ConfigError(
            "asynchrony.staleness_threshold",
            threshold,
            f"up to asynchrony.max_staleness = {most}, beyond which groups would be too old to be trained",
            f"Raise asynchrony.max_staleness to {math.ceil(threshold)}, or lower the threshold.",
        )


def masked_tokens(asynchrony: AsynchronyConfig) -> Iterator[ConfigError]:
    """Tokens that are left out of responses of which none is too old in part."""
    finishes = asynchrony.partial_rollout is False or asynchrony.pause_mode == "wait"
    if finishes and asynchrony.staleness_strategy == "mask":
        allowed = "pace, drop or wait where a response finishes under the version that began it"
        fix = "Leave asynchrony.partial_rollout and asynchrony.pause_mode out, so that it goes on, or leave this out."
        yield ConfigError("asynchrony.staleness_strategy", "mask", allowed, fix)


def on_pods(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Settings that pods would not have, or that others would read."""
    variables = kubernetes.runtime_env.get("env_vars")
    yield from secrets("kubernetes.env", kubernetes.env)
    yield from secrets("kubernetes.runtime_env.env_vars", variables if isinstance(variables, dict) else {})
    for name, value in kubernetes.env.items():
        if name in OWN_VARIABLES:
            fix = "Remove it; the object store's keys come from the secret kubernetes.store_secret."
            shown = "(not shown)" if "KEY" in name else value
            yield ConfigError(f"kubernetes.env.{name}", shown, "a variable that a run does not set itself", fix)
    for name, value in kubernetes.runtime_env.items():
        if name not in RUNTIME_ENVIRONMENT:
            allowed = f"one of the keys {', '.join(RUNTIME_ENVIRONMENT)}"
            yield ConfigError(f"kubernetes.runtime_env.{name}", value, allowed, "Remove it or mend the spelling.")


def secrets(key: str, variables: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Environment variables that are called after what must not stand in settings."""
    for name in variables:
        if name.upper().rpartition("_")[2] in SECRETS and name not in OWN_VARIABLES:
            allowed = "nothing secret: settings are stored and shown"
            fix = "Put it into a Secret of the namespace, and name that in kubernetes.secrets."
            yield ConfigError(f"{key}.{name}", "(not shown)", allowed, fix)


def notices(
    data: DataConfig,
    trainer: TrainerConfig,
    asynchrony: AsynchronyConfig,
    evaluation: EvaluationConfig,
    checkpoint: CheckpointConfig,
) -> Iterator[str]:
    """What is told of a run's settings, which may be meant so, whatever the machine."""
    yield from trained_held_out(data)
    yield from long_warmup(trainer, asynchrony)
    yield from rare_scores(evaluation, trainer, asynchrony)
    yield from rare_checkpoints(checkpoint, trainer, asynchrony)


def long_warmup(trainer: TrainerConfig, asynchrony: AsynchronyConfig) -> Iterator[str]:
    """A notice of a warm-up that outlasts the run, as in a short trial of settings for a long one."""
    steps = trainer.steps * asynchrony.require_batches
    if trainer.warmup_steps > steps:
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps} is more than the {steps} optimizer steps of the run, whose "
            f"learning rate ends at {steps / trainer.warmup_steps:.0%} of trainer.learning_rate"
        )


def trained_held_out(data: DataConfig) -> Iterator[str]:
    """A notice of scores on prompts that are trained, as where a run is only to show that it learns."""
    if data.held_out == data.train:
        yield "data.held_out names the prompts of data.train: the held-out score is of prompts that are trained"


def rare_scores(evaluation: EvaluationConfig, trainer: TrainerConfig, asynchrony: AsynchronyConfig) -> Iterator[str]:
    """A notice of scores during training that are never due: they are counted in versions, and not in steps."""
    versions = versions_of(trainer, asynchrony)
    if evaluation.every > versions:
        yield (
            f"evaluation.every = {evaluation.every} is more than the {versions} policy versions of the run: held-out "
            "prompts are not scored during training"
        )


def rare_checkpoints(
    checkpoint: CheckpointConfig, trainer: TrainerConfig, asynchrony: AsynchronyConfig
) -> Iterator[str]:
    """A notice of checkpoints that are never due before the end: they too are counted in versions."""
    versions = versions_of(trainer, asynchrony)
    if checkpoint.every > versions:
        yield (
            f"checkpoint.every = {checkpoint.every} is more than the {versions} policy versions of the run: its only "
            "checkpoint is the one at the end"
        )


def versions_of(trainer: TrainerConfig, asynchrony: AsynchronyConfig) -> int:
    """Policy versions that a run makes."""
    return math.ceil(trainer.steps / asynchrony.trigger_parameter_sync_step)


def other_processor(rollout: RolloutConfig, gpus: bool) -> Iterator[str]:
    """A notice of settings of engines on the other kind of processor: one file may serve both kinds of machine.

    Args:
        rollout: of the run.
        gpus: whether its engines get GPUs.
    """
    name = "cpu_kv_cache_gib" if gpus else "gpu_memory_utilization"
    if is_set(rollout, name):
        value = in_yaml(rollout.model_dump()[name])
        yield f"rollout.{name} = {value} changes nothing: the engines run {'on GPUs' if gpus else 'without a GPU'}"


def default(section: BaseModel, name: str) -> Any:
    """The default of a setting."""
    return type(section).model_fields[name].get_default(call_default_factory=True)


def is_set(section: BaseModel, name: str) -> bool:
    """Whether a setting says something else than its default."""
    return bool(section.model_dump()[name] != default(section, name))
