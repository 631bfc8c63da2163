"""RunConfig: the settings of a run, checked before anything is paid for.

What is fine alone and impossible together is refused with the key, the value, what is allowed and what to do.
`config/` holds the knobs, `config/reading.py` reads them from a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, model_validator

from tidemill.config import validation as effects
from tidemill.config.address import hub_addresses, model_address, page_addresses, server_addresses
from tidemill.config.asynchrony import AsynchronyConfig, SyncConfig
from tidemill.config.data import DataConfig, RewardConfig
from tidemill.config.kubernetes import RANKS_PER_POD, ClusterConfig, KubernetesConfig
from tidemill.config.rollout import EvaluationConfig, QueueConfig, RolloutConfig
from tidemill.config.section import DNS_LABEL, Section, Text
from tidemill.config.storage import CheckpointConfig, RegistryConfig, StoreConfig, TrackingConfig
from tidemill.config.training import AlgorithmConfig, TrainerConfig
from tidemill.errors import ConfigError, in_yaml

REWARD_METRICS = ("mean", "std_in_group")


class RunConfig(Section):
    """A run, from prompts to a registered model."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)]
    """Identifies the run: its folder, checkpoints and MLflow run. A restart under the same name resumes."""
    model: Text
    """A local folder (relative to the working directory), `s3://bucket/prefix`, `models:/NAME/VERSION` of the registry,
    or a Hugging Face name, of a causal language model with full attention in all layers, such as Llama and Qwen.
    Sliding windows, layers with a state (Mamba) and capped or scaled logits are refused."""
    output: Path = Path("runs")
    """Folder of run folders, the embedded store and the default MLflow file."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Order of prompts, sampling and initialisation."""
    data: DataConfig
    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    asynchrony: AsynchronyConfig = Field(default_factory=AsynchronyConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    registry: RegistryConfig = Field(default_factory=RegistryConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)

    @property
    def required_samples(self) -> int:
        """Groups that one step of the trainer takes."""
        return self.trainer.ppo_mini_batch_size * self.asynchrony.require_batches

    @property
    def groups_per_version(self) -> int:
        """Groups consumed between two weight syncs."""
        return self.required_samples * self.asynchrony.trigger_parameter_sync_step

    @property
    def updates_per_version(self) -> int:
        """Optimizer steps between two weight syncs: one with every mini-batch."""
        return self.asynchrony.require_batches * self.asynchrony.trigger_parameter_sync_step

    @property
    def queue_capacity(self) -> int:
        """`queue.capacity`, or all groups that the staleness bound lets exist at once."""
        return self.queue.capacity or self.groups_per_version * (self.asynchrony.max_staleness + 1)

    @property
    def max_groups_between_syncs(self) -> int | None:
        """The bound as verl has it, or None when `staleness_threshold` is not set."""
        threshold = self.asynchrony.staleness_threshold
        return None if threshold is None else math.floor((1 + threshold) * self.groups_per_version + 1e-9)

    @property
    def synchronous(self) -> bool:
        """No group is in flight at a weight sync, so that a run can be reproduced token by token."""
        return self.asynchrony.max_staleness == 0 or self.max_groups_between_syncs == self.groups_per_version

    @property
    def pause_mode(self) -> Literal["keep", "abort", "wait"]:
        """`asynchrony.pause_mode`, or what `asynchrony.partial_rollout` makes of it."""
        return self.asynchrony.pause_mode or ("wait" if self.asynchrony.partial_rollout is False else "keep")

    @property
    def publication(self) -> SyncConfig:
        """`sync`, with time for the groups in flight where engines let them finish first."""
        extra = self.rollout.group_timeout_s if self.pause_mode == "wait" else 0.0
        return self.sync.model_copy(update={"timeout_s": self.sync.timeout_s + extra})

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.output / self.name

    @property
    def registered_model(self) -> str:
        """Name in the model registry."""
        return self.registry.model or self.name

    @model_validator(mode="before")
    @classmethod
    def fill_in_steps(cls, tree: Any) -> Any:
        """`trainer.steps` from `rollout.total_rollout_steps`, so that all that follows reads one number."""
        return with_steps(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def check_combinations(self) -> RunConfig:
        """Refuse settings that are fine alone and impossible together."""
        for mistake in mistakes(self):
            raise mistake
        return self

    def to_yaml(self) -> str:
        """The resolved settings, as a file that `run_file.load_config` reads back to an equal RunConfig."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def with_steps(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings as they were read, with `trainer.steps` where it follows from `rollout.total_rollout_steps`.

    Raises:
        ConfigError: so few groups fill no step of the trainer.
    """
    rollout, trainer, asynchrony = (tree.get(name) or {} for name in ("rollout", "trainer", "asynchrony"))
    if not all(isinstance(section, dict) for section in (rollout, trainer, asynchrony)):
        return tree  # refused by their types
    total: Any = rollout.get("total_rollout_steps")
    step = [
        trainer.get("ppo_mini_batch_size", TrainerConfig.model_fields["ppo_mini_batch_size"].default),
        asynchrony.get("require_batches", AsynchronyConfig.model_fields["require_batches"].default),
    ]
    if trainer.get("steps") is not None or not all(isinstance(number, int) and number > 0 for number in (total, *step)):
        return tree
    if total < math.prod(step):
        raise too_few_rollouts(total, math.prod(step))
    return tree | {"trainer": trainer | {"steps": total // math.prod(step)}}


def mistakes(config: RunConfig) -> Iterator[ConfigError]:
    """Everything that cannot work, before anything starts."""
    yield from amounts(config)
    yield from staleness(config)
    yield from interruptions(config)
    yield from decoupled(config)
    yield from held_out(config)
    yield from reward_names(config)
    yield from folder_name(config)
    yield from without_effect(config)
    yield from model_address(config.model)
    yield from hub_addresses(config.data)
    yield from server_addresses(config.tracking, config.store)
    yield from page_addresses(config.kubernetes)
    yield from on_kubernetes(config)


def without_effect(config: RunConfig) -> Iterator[ConfigError]:
    """Settings that nothing would look at beside the others."""
    yield from effects.loose_threshold(config.asynchrony)
    yield from effects.masked_tokens(config.asynchrony)
    yield from effects.full_snapshots(config.sync)
    yield from effects.scored_prompts(config.data, config.evaluation)
    yield from effects.weights(config.rewards)
    yield from effects.smallest_score(config.registry, config.rewards)
    yield from effects.gpu_budget(config.kubernetes)


def amounts(config: RunConfig) -> Iterator[ConfigError]:
    """Numbers of groups that do not fit each other."""
    needed, capacity, total = config.required_samples, config.queue.capacity, config.rollout.total_rollout_steps
    if capacity is not None and capacity < needed:
        yield ConfigError(
            "queue.capacity",
            capacity,
            f"at least the {needed} groups that one step of the trainer waits for",
            "Raise it, or lower trainer.ppo_mini_batch_size or asynchrony.require_batches.",
        )
    if total is not None and total < needed:
        yield too_few_rollouts(total, needed)
    if total is not None and total // needed != config.trainer.steps:
        yield ConfigError(
            "trainer.steps",
            config.trainer.steps,
            f"{total // needed}, the steps that rollout.total_rollout_steps = {total} groups fill, {needed} each",
            "Give one of the two; null leaves the other out.",
        )


def too_few_rollouts(total: int, needed: int) -> ConfigError:
    """So few groups fill no step of the trainer."""
    return ConfigError(
        "rollout.total_rollout_steps",
        total,
        f"at least the {needed} groups of one step of the trainer",
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
    if config.synchronous and a.staleness_strategy in ("drop", "mask"):
        yield ConfigError(
            "asynchrony.staleness_strategy",
            a.staleness_strategy,
            f"pace or wait with {no_lead(config)}: nothing runs ahead that could become too old",
            f"{more_lead(config)}, or pace.",
        )


def no_lead(config: RunConfig) -> str:
    """The setting that makes a run synchronous, in words."""
    if config.asynchrony.max_staleness == 0:
        return "asynchrony.max_staleness = 0"
    threshold, groups = config.asynchrony.staleness_threshold, config.groups_per_version
    return f"asynchrony.staleness_threshold = {threshold:g}, which adds no group to the {groups} of a version"


def more_lead(config: RunConfig) -> str:
    """What lets generation run ahead where `no_lead` says why it does not."""
    if config.asynchrony.max_staleness == 0:
        return "Raise asynchrony.max_staleness"
    return f"Raise asynchrony.staleness_threshold to 1 / {config.groups_per_version} at least, or leave it out"


def interruptions(config: RunConfig) -> Iterator[ConfigError]:
    """Partial rollouts that nothing can make, or that contradict the pause mode."""
    a = config.asynchrony
    if a.partial_rollout and config.synchronous:
        yield ConfigError(
            "asynchrony.partial_rollout",
            True,
            f"false or null with {no_lead(config)}: no group is in flight at a weight sync",
            f"{more_lead(config)}, or leave partial rollouts out.",
        )
    if a.pause_mode in ("keep", "abort") and config.synchronous:
        yield ConfigError(
            "asynchrony.pause_mode",
            a.pause_mode,
            f"wait or null with {no_lead(config)}: no group is in flight at a weight sync",
            f"{more_lead(config)}, or leave the mode out.",
        )
    if a.partial_rollout is not None and a.pause_mode is not None and a.partial_rollout == (a.pause_mode == "wait"):
        allowed = "keep or abort with" if a.partial_rollout else "wait without"
        yield ConfigError(
            "asynchrony.pause_mode",
            a.pause_mode,
            f"{allowed} partial rollouts (asynchrony.partial_rollout = {in_yaml(a.partial_rollout)})",
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
            allowed = f"{in_yaml(default)} unless algorithm.old_log_prob is decoupled"
            fix = "Set algorithm.old_log_prob to decoupled, or leave this out."
            yield ConfigError(f"algorithm.{key}", value, allowed, fix)


def held_out(config: RunConfig) -> Iterator[ConfigError]:
    """Scores without prompts to score on."""
    wanted = {"evaluation.every": config.evaluation.every or None, "registry.min_score": config.registry.min_score}
    for key, value in wanted.items():
        if value is not None and config.data.held_out is None:
            allowed = f"{0 if key == 'evaluation.every' else 'null'} without data.held_out"
            yield ConfigError(key, value, allowed, "Name a held-out file.")
    mode, every, engines = config.evaluation.mode, config.evaluation.every, config.rollout.engines
    if mode != "blocking" and every == 0:
        allowed = "blocking with evaluation.every = 0, which scores nothing during training"
        yield ConfigError("evaluation.mode", mode, allowed, "Set evaluation.every, or leave the mode out.")
    if mode == "spare" and engines == 1:
        allowed = "blocking or concurrent with rollout.engines = 1: no engine can be spared"
        yield ConfigError("evaluation.mode", mode, allowed, "Raise rollout.engines, or take concurrent.")
    alias = config.registry.alias.lower()
    if alias in ("champion", "latest") or (alias[0] == "v" and alias[1:].isdecimal()):
        allowed = "another name than champion, and than latest, v1, v2 and so on, which MLflow keeps to itself"
        fix = "The champion is a version that scores no less than the one which was it. Leave this out."
        yield ConfigError("registry.alias", config.registry.alias, allowed, fix)


def reward_names(config: RunConfig) -> Iterator[ConfigError]:
    """Functions whose metric would have the name of another, `rollout/reward/NAME`, or one that MLflow refuses."""
    for place, reward in enumerate(config.rewards):
        name = reward.function.rpartition(":")[2]
        if name in REWARD_METRICS:
            key = f"rewards.{place}.function"
            allowed = (
                f"a function of another name than {' and '.join(REWARD_METRICS)}, which are metrics of all rewards"
            )
            yield ConfigError(key, reward.function, allowed, "Rename it.")
        if not name.isascii():
            allowed = (
                "a function whose name has no letters but a to z, because a metric gets it and MLflow takes no others"
            )
            yield ConfigError(f"rewards.{place}.function", reward.function, allowed, "Rename it.")


def folder_name(config: RunConfig) -> Iterator[ConfigError]:
    """A folder of runs whose name means something else to who keeps files in it."""
    folder = str(config.output.expanduser().absolute())
    embedded, database = config.store.endpoint == "embedded", config.tracking.uri is None
    for sign, used, meaning in (
        (",", embedded, "the embedded store takes what stands around one for two folders"),
        ("?", database, "MLflow takes it for the end of the file's name"),
        ("%", database, "MLflow takes it for the code of another letter"),
    ):
        if used and sign in folder:
            yield ConfigError("output", folder, f"a path without {sign!r}: {meaning}", "Name another folder.")


def on_kubernetes(config: RunConfig) -> Iterator[ConfigError]:
    """What only works where all processes share a machine, and settings of a cluster that is not asked for."""
    if config.cluster.provider != "kuberay":
        if config.kubernetes != KubernetesConfig():
            changed = config.kubernetes.model_dump(exclude_defaults=True)
            fix = "Set cluster.provider to kuberay, or leave the section out."
            yield ConfigError("kubernetes", changed, "nothing unless cluster.provider is kuberay", fix)
        return
    apart = "Engines, trainer and the pipeline's steps run in pods that share no disk and no memory."
    for key, value, allowed in (
        ("sync.transport", config.sync.transport, "object_store"),
        ("store.endpoint", config.store.endpoint, "the http(s)://host:port of an S3 server"),
        ("tracking.uri", config.tracking.uri, "the address of an MLflow server"),
    ):
        if value in ("shared_memory", "embedded", None) or (key == "tracking.uri" and value.startswith("sqlite:")):
            yield ConfigError(key, value, f"{allowed} with cluster.provider = kuberay", apart)
    yield from effects.on_pods(config.kubernetes)
    yield from sizes(config)
    if config.kubernetes.image.endswith(":latest"):
        fix = "Whatever stands behind latest may change between two pods of a run. Name a version."
        yield ConfigError("kubernetes.image", config.kubernetes.image, "a tag other than latest", fix)
    most, engines = config.kubernetes.max_engines, config.rollout.engines
    if most is not None and most < engines:
        yield ConfigError("kubernetes.max_engines", most, f"at least rollout.engines = {engines}", "Raise it.")
    if most is not None and most > engines and config.kubernetes.queue is not None:
        fix = "Kueue admits a run as a whole. Leave one of the two out."
        yield ConfigError("kubernetes.max_engines", most, "null with kubernetes.queue", fix)
    if config.trainer.ranks > RANKS_PER_POD and config.trainer.ranks % RANKS_PER_POD:
        yield ConfigError("trainer.ranks", config.trainer.ranks, "up to 8, or a multiple of 8", "A pod holds 8 ranks.")


def sizes(config: RunConfig) -> Iterator[ConfigError]:
    """Pods whose parts are larger than they are."""
    for role, pod in (("trainer", config.kubernetes.trainer), ("rollout", config.kubernetes.rollout)):
        if pod.shared_memory_gib > pod.memory_gib:
            key, allowed = f"kubernetes.{role}.shared_memory_gib", f"up to {pod.memory_gib}, the pod's memory_gib"
            fix = "What is written there counts as memory of the pod."
            yield ConfigError(key, pod.shared_memory_gib, allowed, fix)


def fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every knob as (dotted key, section that holds it, field name), for the documentation and its tests."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields(annotation, f"{prefix}{name}.")
        elif name == "rewards":
            yield from fields(RewardConfig, f"{prefix}rewards.N.")
        else:
            yield f"{prefix}{name}", section, name
