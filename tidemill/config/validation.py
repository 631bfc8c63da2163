"""Checks that the settings of a run fit together, before anything starts.

Settings that are valid alone and impossible together are refused. So is a setting without effect, because the user
expects one; a setting at its default never is, so that the resolved settings of a run can be read back. `notices` are
about settings that may be intended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tidemill.config.address import (
    CREDENTIALS,
    HUB_TOKEN,
    MODEL_PREFIX,
    PASSWORD,
    SERVER,
    TRACKING,
    is_server,
    is_tracking,
    without_password,
)
from tidemill.config.algorithm_validation import algorithm_mistakes, clips_without_effect
from tidemill.config.data import RewardConfig
from tidemill.config.kubernetes import KubernetesConfig
from tidemill.config.kubernetes_validation import kubernetes_mistakes
from tidemill.config.rollout import RolloutConfig
from tidemill.config.run import RunConfig
from tidemill.config.section import default, is_set
from tidemill.errors import ConfigError, in_yaml

UNKNOWN = (-math.inf, math.inf)
BOUNDS = {
    "exact_number": (0.0, 1.0),
    "math_verify": (0.0, 1.0),
    "reasoning_gym": (0.0, 1.0),
    "overlong": (-math.inf, 0.0),
}
"""Smallest and largest value of the built-in reward functions, see `rollout.rewards`."""
SLOW_TOKENS_S = 20.0
"""Tokens of one response that a busy engine samples in a second."""
REWARD_METRICS = ("mean", "std_in_group")
RAISE_GROUPS = "Raise it, or lower trainer.ppo_mini_batch_size or asynchrony.require_batches."


def check(config: RunConfig) -> None:
    """Check a run's settings against one another.

    Raises:
        ConfigError: for the first mistake.
    """
    for mistake in mistakes(config):
        raise mistake


def mistakes(config: RunConfig) -> Iterator[ConfigError]:
    """Every mistake in the settings of a run."""
    yield from amounts(config)
    yield from full_queue(config)
    yield from staleness(config)
    yield from pauses(config)
    yield from algorithm_mistakes(config)
    yield from scores(config)
    yield from registry(config)
    yield from rewards(config)
    yield from output_folder(config)
    yield from snapshots(config)
    yield from addresses(config)
    if config.cluster.provider == "kuberay":
        yield from kubernetes_mistakes(config)
    elif config.kubernetes != KubernetesConfig():
        changed = config.kubernetes.model_dump(exclude_defaults=True)
        fix = "Set cluster.provider to kuberay, or leave the section out."
        yield ConfigError("kubernetes", changed, "no setting unless cluster.provider is kuberay", fix)


def amounts(config: RunConfig) -> Iterator[ConfigError]:
    """Numbers of groups that contradict each other."""
    needed, capacity, total = config.required_samples, config.queue.capacity, config.rollout.total_rollout_steps
    if capacity is not None and capacity < needed:
        allowed = f"at least the {needed} groups that one step of the trainer needs"
        yield ConfigError("queue.capacity", capacity, allowed, RAISE_GROUPS)
    if total is not None and total < needed:
        allowed = f"at least the {needed} groups of one step of the trainer"
        yield ConfigError("rollout.total_rollout_steps", total, allowed, RAISE_GROUPS)
    if total is not None and total // needed != config.trainer.steps:
        yield ConfigError(
            "trainer.steps",
            config.trainer.steps,
            f"{total // needed}, because rollout.total_rollout_steps = {total} groups fill that many steps of {needed}",
            "Set one of the two settings and set the other to null.",
        )


def full_queue(config: RunConfig) -> Iterator[ConfigError]:
    """Refuse `queue.when_full` if the queue can never fill."""
    most, bound = math.inf, ""
    if config.asynchrony.staleness_strategy != "drop":
        most = config.groups_per_version * (config.asynchrony.max_staleness + 1)
        bound = f"asynchrony.staleness_strategy = {config.asynchrony.staleness_strategy}"
    if (threshold := config.max_groups_between_syncs) is not None and threshold < most:
        most, bound = threshold, f"asynchrony.staleness_threshold = {config.asynchrony.staleness_threshold:g}"
    if config.queue.when_full == "drop_oldest" and config.queue_capacity >= most:
        yield ConfigError(
            "queue.when_full",
            "drop_oldest",
            f"block, because the queue never fills. It holds {config.queue_capacity} groups, and {bound} allows {most}",
            "Lower queue.capacity, or leave this out.",
        )


def staleness(config: RunConfig) -> Iterator[ConfigError]:
    """Staleness settings that cancel each other."""
    a = config.asynchrony
    threshold, most = a.staleness_threshold, a.max_staleness
    if threshold and most == 0:
        yield ConfigError(
            "asynchrony.staleness_threshold",
            threshold,
            "0 or null with asynchrony.max_staleness = 0, which allows no group for the next version",
            "Raise asynchrony.max_staleness, or leave the threshold out.",
        )
    if threshold is not None and threshold > most > 0 and a.staleness_strategy != "drop":
        yield ConfigError(
            "asynchrony.staleness_threshold",
            threshold,
            f"at most asynchrony.max_staleness = {most}: groups beyond that would be too old to be trained",
            f"Raise asynchrony.max_staleness to {math.ceil(threshold)}, or lower the threshold.",
        )
    if config.synchronous and a.staleness_strategy in ("drop", "mask"):
        reason, fix = why_synchronous(config)
        allowed = f"pace or wait with {reason}: no group can become too old"
        yield ConfigError("asynchrony.staleness_strategy", a.staleness_strategy, allowed, f"{fix}, or use pace.")
    if a.staleness_strategy == "mask" and config.pause_mode == "wait":
        allowed = "pace, drop or wait, because every response finishes under the version that began it"
        fix = "Leave asynchrony.partial_rollout and asynchrony.pause_mode out, or leave this out."
        yield ConfigError("asynchrony.staleness_strategy", "mask", allowed, fix)


def why_synchronous(config: RunConfig) -> tuple[str, str]:
    """The setting that makes a run synchronous, and how to change it."""
    if config.asynchrony.max_staleness == 0:
        return "asynchrony.max_staleness = 0", "Raise asynchrony.max_staleness"
    threshold, groups = config.asynchrony.staleness_threshold, config.groups_per_version
    return (
        f"asynchrony.staleness_threshold = {threshold:g}, which adds no group to the {groups} of a version",
        f"Set asynchrony.staleness_threshold to null or at least 1 / {groups}",
    )


def pauses(config: RunConfig) -> Iterator[ConfigError]:
    """Partial rollouts and pause modes that are impossible or contradict each other."""
    a = config.asynchrony
    if config.synchronous and (a.partial_rollout or a.pause_mode in ("keep", "abort")):
        reason, fix = why_synchronous(config)
        name, value, fitting = (
            ("partial_rollout", True, "false") if a.partial_rollout else ("pause_mode", a.pause_mode, "wait")
        )
        allowed = f"{fitting} or null with {reason}: no group is in flight at a weight sync"
        yield ConfigError(f"asynchrony.{name}", value, allowed, f"{fix}, or leave this out.")
    if a.partial_rollout is not None and a.pause_mode is not None and a.partial_rollout == (a.pause_mode == "wait"):
        allowed = "keep or abort" if a.partial_rollout else "wait"
        yield ConfigError(
            "asynchrony.pause_mode",
            a.pause_mode,
            f"{allowed} with asynchrony.partial_rollout = {in_yaml(a.partial_rollout)}",
            "Leave one of the two out.",
        )


def scores(config: RunConfig) -> Iterator[ConfigError]:
    """Scores without held-out prompts, and evaluation modes that cannot work."""
    every, mode, engines = config.evaluation.every, config.evaluation.mode, config.rollout.engines
    for key, value, off in (
        ("evaluation.every", every, 0),
        ("registry.min_score", config.registry.min_score, None),
        ("evaluation.max_prompts", config.evaluation.max_prompts, None),
    ):
        if value != off and config.data.held_out is None:
            yield ConfigError(key, value, f"{in_yaml(off)} without data.held_out", "Name a held-out file.")
    if mode != "blocking" and every == 0:
        allowed = "blocking with evaluation.every = 0, which scores nothing during training"
        yield ConfigError("evaluation.mode", mode, allowed, "Set evaluation.every, or leave the mode out.")
    if mode == "spare" and engines == 1:
        allowed = "blocking or concurrent with rollout.engines = 1: no engine can be spared"
        yield ConfigError("evaluation.mode", mode, allowed, "Raise rollout.engines, or use concurrent.")


def registry(config: RunConfig) -> Iterator[ConfigError]:
    """Aliases that MLflow or Tidemill use, and a score that no model reaches."""
    alias = config.registry.alias.lower()
    if alias in ("champion", "latest") or (alias[0] == "v" and alias[1:].isdecimal()):
        allowed = (
            "a name other than champion, which Tidemill sets itself, and latest, v1, v2 ..., which MLflow reserves"
        )
        yield ConfigError("registry.alias", config.registry.alias, allowed, "Choose another name, or leave this out.")
    least, most = config.registry.min_score, largest_reward(config.rewards)
    if least is not None and least > most:
        allowed = f"at most {most:g}, the largest reward of these functions"
        yield ConfigError("registry.min_score", least, allowed, "It is a mean reward, not a percentage.")


def largest_reward(rewards: Sequence[RewardConfig]) -> float:
    """The largest possible weighted sum of rewards; infinite with functions that are not built in."""
    return sum(
        max(reward.weight * bound for bound in BOUNDS.get(reward.function, UNKNOWN))
        for reward in rewards
        if reward.weight
    )


def rewards(config: RunConfig) -> Iterator[ConfigError]:
    """Rewards without effect, and functions whose name cannot be that of their metric, `rollout/reward/NAME`."""
    if not any(reward.weight for reward in config.rewards):
        allowed = "a weight other than 0 for at least one reward"
        fix = "Otherwise all advantages are 0 and nothing is learned."
        yield ConfigError("rewards.0.weight", config.rewards[0].weight, allowed, fix)
    for place, reward in enumerate(config.rewards):
        name = reward.function.rpartition(":")[2]
        if name in REWARD_METRICS:
            allowed = (
                f"a function with another name than {' and '.join(REWARD_METRICS)}, which are metrics of all rewards"
            )
            yield ConfigError(f"rewards.{place}.function", reward.function, allowed, "Rename it.")
        if not name.isascii():
            allowed = "a function with an ASCII name: a metric gets the name, and MLflow takes no other letters"
            yield ConfigError(f"rewards.{place}.function", reward.function, allowed, "Rename it.")


def output_folder(config: RunConfig) -> Iterator[ConfigError]:
    """An output folder whose name is misread by the embedded store or by MLflow's database."""
    folder = str(config.output.expanduser().absolute())
    embedded, database = config.store.endpoint == "embedded", config.tracking.uri is None
    for sign, used, reason in (
        (",", embedded, "the embedded store reads two folders"),
        ("?", database, "MLflow reads the end of the file name"),
        ("%", database, "MLflow reads an escaped character"),
    ):
        if used and sign in folder:
            yield ConfigError("output", folder, f"a path without {sign!r}, where {reason}", "Name another folder.")


def snapshots(config: RunConfig) -> Iterator[ConfigError]:
    """An interval of full snapshots where nothing is stored."""
    sync = config.sync
    if sync.transport == "shared_memory" and is_set(sync, "full_every"):
        allowed = f"{default(sync, 'full_every')} with sync.transport = 'shared_memory', which always sends all weights"
        fix = "Set sync.transport to object_store, or leave this out."
        yield ConfigError("sync.full_every", sync.full_every, allowed, fix)


def addresses(config: RunConfig) -> Iterator[ConfigError]:
    """Addresses that are malformed or hold a credential."""
    if config.model.startswith("s3:") and not MODEL_PREFIX.fullmatch(config.model):
        yield ConfigError("model", config.model, "s3://BUCKET/PREFIX for a model in the store", "Correct it.")
    for name, source in (("train", config.data.train), ("held_out", config.data.held_out)):
        if source is not None and HUB_TOKEN.match(source):
            fix = "Settings are stored and shown. Set HF_TOKEN; on Kubernetes through a secret in kubernetes.secrets."
            yield ConfigError(f"data.{name}", HUB_TOKEN.sub(r"\1(not shown)", source), "a source without a token", fix)
    uri, endpoint = config.tracking.uri, config.store.endpoint
    if uri is not None and PASSWORD.match(uri):
        fix = (
            "Settings are stored and shown. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for a server; "
            "database drivers have variables of their own, such as PGPASSWORD."
        )
        yield ConfigError("tracking.uri", without_password(uri), "an address without a password", fix)
    elif uri is not None and not is_tracking(uri):
        yield ConfigError("tracking.uri", uri, f"{TRACKING}; or null", "Correct it, or leave it out.")
    if endpoint != "embedded" and not is_server(endpoint, bare=True):
        fix = "Correct it. The bucket is the setting store.bucket, and the keys come from the environment."
        shown = CREDENTIALS.sub("//(not shown)@", endpoint)
        yield ConfigError("store.endpoint", shown, f"embedded, or {SERVER} of an S3 server", fix)


def notices(config: RunConfig) -> Iterator[str]:
    """Settings that may be a mistake on any machine, in words."""
    versions, updates, warmup = (
        config.versions,
        config.trainer.steps * config.asynchrony.require_batches,
        config.trainer.warmup_steps,
    )
    if config.data.held_out == config.data.train:
        yield "data.held_out names the prompts of data.train: the held-out score is that of trained prompts"
    yield from late_deadlines(config)
    yield from clips_without_effect(config)
    if 1 < config.trainer.steps <= config.asynchrony.trigger_parameter_sync_step:
        yield (
            f"asynchrony.trigger_parameter_sync_step = {config.asynchrony.trigger_parameter_sync_step} with "
            f"trainer.steps = {config.trainer.steps}: all groups are sampled from the first policy"
        )
    if config.trainer.ppo_mini_batch_size < config.trainer.ranks:
        yield (
            f"trainer.ppo_mini_batch_size = {config.trainer.ppo_mini_batch_size} is less than trainer.ranks = "
            f"{config.trainer.ranks}: a rank without a group waits for the others in every optimizer step"
        )
    if warmup > updates:
        yield (
            f"trainer.warmup_steps = {warmup} is more than the {updates} optimizer steps of the run, whose "
            f"learning rate ends at {updates / warmup:.0%} of trainer.learning_rate"
        )
    if config.evaluation.every > versions:
        yield (
            f"evaluation.every = {config.evaluation.every} is more than the {versions} policy versions of the run: "
            "held-out prompts are not scored during training"
        )
    if config.checkpoint.every > versions:
        yield (
            f"checkpoint.every = {config.checkpoint.every} is more than the {versions} policy versions of the run: its "
            "only checkpoint is the one at the end"
        )


def late_deadlines(config: RunConfig) -> Iterator[str]:
    """Deadlines that end work too early or never."""
    rollout, waits = config.rollout, config.trainer.get_timeout_s
    speed = rollout.max_new_tokens / rollout.group_timeout_s
    if speed > SLOW_TOKENS_S:
        yield (
            f"rollout.group_timeout_s = {rollout.group_timeout_s:g} cancels a group with a response of "
            f"rollout.max_new_tokens = {rollout.max_new_tokens}, unless an engine samples {speed:.0f} tokens/s for "
            "each response; with many responses at once it is often slower"
        )
    if waits <= rollout.group_timeout_s:
        yield (
            f"trainer.get_timeout_s = {waits:g} fails the run before rollout.group_timeout_s = "
            f"{rollout.group_timeout_s:g} cancels a slow group"
        )
    for place, reward in enumerate(config.rewards):
        if is_set(reward, "timeout_s") and reward.timeout_s > rollout.group_timeout_s:
            yield (
                f"rewards.{place}.timeout_s = {reward.timeout_s:g} has no effect: scoring a group ends after "
                f"rollout.group_timeout_s = {rollout.group_timeout_s:g}"
            )


def other_processor(rollout: RolloutConfig, gpus: bool) -> Iterator[str]:
    """A notice of engine settings for the other kind of processor: one file may serve both kinds of machine.

    Args:
        rollout: of the run.
        gpus: whether its engines get GPUs.
    """
    name = "cpu_kv_cache_gib" if gpus else "gpu_memory_utilization"
    if is_set(rollout, name):
        value = in_yaml(rollout.model_dump()[name])
        yield f"rollout.{name} = {value} has no effect: the engines run {'on GPUs' if gpus else 'without a GPU'}"
