"""How responses are sampled, kept for the trainer, and scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import Count, Fraction, Positive, Seconds, Section, Text


class RolloutConfig(Section):
    """How responses are sampled."""

    engines: Positive = 1
    """vLLM engines, each a Ray actor."""
    tensor_parallel_size: Positive = 1
    """GPUs per engine."""
    group_size: Positive = 8
    """Responses per prompt (n); an estimator that compares them needs at least two."""
    max_new_tokens: Positive = 1024
    """Response budget in tokens."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature; log-probs are those of the tempered distribution on both sides."""
    stop: list[Text] = Field(default_factory=list)
    """Strings that end a response, besides the end-of-sequence token."""
    concurrent_samples_per_replica: Positive = 16
    """Groups in flight per engine (verl's samples are groups)."""
    total_rollout_steps: Positive | None = None
    """Groups that the whole run trains, as in verl; sets `trainer.steps` if that is left out."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Engine precision; auto is bfloat16 where the processor computes in it, else float32."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of a GPU's memory that vLLM uses."""
    cpu_kv_cache_gib: Positive = 1
    """KV cache of an engine on the CPU."""
    threads: Positive | None = None
    """OpenMP threads of an engine on the CPU; null uses all cores."""
    start_timeout_s: Seconds = 600.0
    """An engine that is not ready by then fails the run at its start. A replacement of an engine that died is tried
    again while other engines work, and fails the run if no other is left."""
    group_timeout_s: Seconds = 600.0
    """A group that takes longer is cancelled, and its prompt is issued again."""
    max_attempts: Positive = 3
    """Failures after which a prompt is quarantined: set aside, counted and reported."""


class QueueConfig(Section):
    """Finished groups on their way to the trainer."""

    capacity: Positive | None = None
    """Largest number of groups; null derives it from the staleness bound."""
    when_full: Literal["block", "drop_oldest"] = "block"
    """`block` makes the rollouter wait; `drop_oldest` drops the oldest group, counts it and issues its prompt again."""


class EvaluationConfig(Section):
    """Scores on held-out prompts, which are answered greedily."""

    every: Count = 0
    """Policy versions between two evaluations during training; 0 evaluates only before and after training."""
    mode: Literal["blocking", "concurrent", "spare"] = "blocking"
    """`blocking`: the trainer waits for the score. `concurrent`: held-out prompts are answered during training, with
    priority over rollouts, and only the next weight sync waits. `spare`: one of several engines answers them, keeps its
    version meanwhile and catches up afterwards, so that nothing waits."""
    max_prompts: Positive | None = None
    """Prompts per evaluation; null uses all of `data.held_out`."""
