"""RunConfig: every setting of a run, and the numbers that follow from them.

A RunConfig has checked each setting alone. `reading` also checks with `validation` that the settings fit together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, model_validator

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.asynchrony import AsynchronyConfig, SyncConfig
from tidemill.config.data import DataConfig, RewardConfig, reward_names
from tidemill.config.kubernetes import ClusterConfig, KubernetesConfig
from tidemill.config.rollout import EvaluationConfig, QueueConfig, RolloutConfig
from tidemill.config.section import DNS_LABEL, Section, Text
from tidemill.config.storage import CheckpointConfig, RegistryConfig, StoreConfig, TrackingConfig
from tidemill.config.trainer import TrainerConfig


class RunConfig(Section):
    """A run, from prompts to a registered model."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)]
    """Identifies the run: its folder, checkpoints and MLflow run. A restart under the same name resumes."""
    model: Text
    """A local folder (relative to the working directory), `s3://bucket/prefix`, `models:/NAME/VERSION` of the registry,
    or a Hugging Face name, of a causal language model with full attention in all layers, such as Llama and Qwen.
    Sliding windows, layers with a state (Mamba), capped or scaled logits, quantised weights and adapters are
    refused."""
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
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward function by the name that its metrics have."""
        return dict(zip(reward_names(self.rewards), (reward.weight for reward in self.rewards), strict=True))

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
    def versions(self) -> int:
        """Policy versions that the whole run makes."""
        return math.ceil(self.trainer.steps / self.asynchrony.trigger_parameter_sync_step)

    @property
    def queue_capacity(self) -> int:
        """`queue.capacity`, or all groups that the staleness bound lets exist at once."""
        return self.queue.capacity or self.groups_per_version * (self.asynchrony.max_staleness + 1)

    @property
    def max_groups_between_syncs(self) -> int | None:
        """The bound as verl defines it, or None when `staleness_threshold` is not set."""
        threshold = self.asynchrony.staleness_threshold
        return None if threshold is None else math.floor((1 + threshold) * self.groups_per_version + 1e-9)

    @property
    def synchronous(self) -> bool:
        """Whether no group is in flight at a weight sync, so that a run can be reproduced token by token."""
        return self.asynchrony.max_staleness == 0 or self.max_groups_between_syncs == self.groups_per_version

    @property
    def pause_mode(self) -> Literal["keep", "abort", "wait"]:
        """`asynchrony.pause_mode`, or what follows from `asynchrony.partial_rollout`."""
        return self.asynchrony.pause_mode or ("wait" if self.asynchrony.partial_rollout is False else "keep")

    @property
    def publication(self) -> SyncConfig:
        """`sync`, with more time where engines let groups in flight finish first."""
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
    def derive_steps(cls, tree: Any) -> Any:
        """Set `trainer.steps` where it follows from `rollout.total_rollout_steps`, so that later code reads one number.

        So few groups that they fill no step give 1 step here, and are refused by `validation`.
        """
        if not isinstance(tree, dict):
            return tree
        rollout, trainer, asynchrony = (tree.get(name) or {} for name in ("rollout", "trainer", "asynchrony"))
        if not all(isinstance(section, dict) for section in (rollout, trainer, asynchrony)):
            return tree  # refused by their types
        total: Any = rollout.get("total_rollout_steps")
        groups = [
            trainer.get("ppo_mini_batch_size", TrainerConfig.model_fields["ppo_mini_batch_size"].default),
            asynchrony.get("require_batches", AsynchronyConfig.model_fields["require_batches"].default),
        ]
        numbers = all(isinstance(number, int) and number > 0 for number in (total, *groups))
        if trainer.get("steps") is not None or not numbers:
            return tree
        return tree | {"trainer": trainer | {"steps": max(1, total // math.prod(groups))}}

    def to_yaml(self) -> str:
        """The resolved settings, as a file that `reading.load_config` reads back to an equal RunConfig."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every setting as (dotted key, section that holds it, field name), for the documentation and its tests."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields(annotation, f"{prefix}{name}.")
        elif name == "rewards":
            yield from fields(RewardConfig, f"{prefix}rewards.N.")
        else:
            yield f"{prefix}{name}", section, name
