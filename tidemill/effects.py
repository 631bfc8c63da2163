"""Settings that would change nothing beside the others: somebody who writes one expects that it does.

One that keeps its default is never refused, so that the settings of a run, written out in full, can be read again; nor
is a limit that is not reached. What depends on the machine is told of when the run starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tidemill.errors import ConfigError, in_yaml

if TYPE_CHECKING:
    from tidemill.config import RunConfig

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


def without_effect(config: RunConfig) -> Iterator[ConfigError]:
    """Settings that nothing would look at."""
    yield from loose_threshold(config)
    if config.sync.transport == "shared_memory" and is_set(config.sync, "full_every"):
        allowed = f"{default(config.sync, 'full_every')} with sync.transport = 'shared_memory', which hands over all"
        fix = "Set sync.transport to object_store, or leave this out."
        yield ConfigError("sync.full_every", config.sync.full_every, allowed, fix)
    if config.data.held_out is None and config.evaluation.max_prompts is not None:
        fix = "Name a held-out file."
        yield ConfigError("evaluation.max_prompts", config.evaluation.max_prompts, "null without data.held_out", fix)
    if not any(reward.weight for reward in config.rewards):
        fix = "Without one all advantages are 0, and nothing is learned."
        yield ConfigError("rewards.0.weight", config.rewards[0].weight, "another number than 0 for one reward", fix)
    if config.kubernetes.gpu_hours is not None and config.kubernetes.gpu_resource is None:
        fix = "The budget counts GPUs. Limit the time with kubernetes.max_hours."
        allowed = "null with kubernetes.gpu_resource = null, with which a run has no GPU"
        yield ConfigError("kubernetes.gpu_hours", config.kubernetes.gpu_hours, allowed, fix)


def loose_threshold(config: RunConfig) -> Iterator[ConfigError]:
    """A threshold that lets more groups start than the hard bound, which is the one that counts."""
    a = config.asynchrony
    threshold, most = a.staleness_threshold, a.max_staleness
    if threshold is not None and threshold > most > 0 and a.staleness_strategy != "drop":
        yield ConfigError(
            "asynchrony.staleness_threshold",
            threshold,
            f"up to asynchrony.max_staleness = {most}, beyond which groups would be too old to be trained",
            f"Raise asynchrony.max_staleness to {math.ceil(threshold)}, or lower the threshold.",
        )


def on_pods(config: RunConfig) -> Iterator[ConfigError]:
    """Settings that pods would not have."""
    settings = config.kubernetes
    for name, value in settings.env.items():
        if name in OWN_VARIABLES:
            fix = "Remove it; the object store's keys come from the secret kubernetes.store_secret."
            shown = "(not shown)" if "KEY" in name else value
            yield ConfigError(f"kubernetes.env.{name}", shown, "a variable that a run does not set itself", fix)
    for name, value in settings.runtime_env.items():
        if name not in RUNTIME_ENVIRONMENT:
            allowed = f"one of the keys {', '.join(RUNTIME_ENVIRONMENT)}"
            yield ConfigError(f"kubernetes.runtime_env.{name}", value, allowed, "Remove it or mend the spelling.")


def other_processor(config: RunConfig, gpus: bool) -> Iterator[str]:
    """Settings of engines on the other kind of processor, for a notice: one file may serve both kinds of machine.

    Args:
        config: of the run.
        gpus: whether engines get GPUs.
    """
    name = "cpu_kv_cache_gib" if gpus else "gpu_memory_utilization"
    if is_set(config.rollout, name):
        value = in_yaml(config.rollout.model_dump()[name])
        yield f"rollout.{name} = {value} changes nothing: the engines run {'on GPUs' if gpus else 'without a GPU'}"


def default(section: BaseModel, name: str) -> Any:
    """The default of a setting."""
    return type(section).model_fields[name].get_default(call_default_factory=True)


def is_set(section: BaseModel, name: str) -> bool:
    """Whether a setting says something else than its default."""
    return bool(section.model_dump()[name] != default(section, name))
