"""How far generation may run ahead, and how new weights reach it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import Count, Positive, Seconds, Section


class AsynchronyConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: Count = 1
    """Hard bound on the age of any trained token, in policy versions; 0 is synchronous training."""
    staleness_threshold: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] | None = None
    """Also limits the groups that start between two weight syncs to `(1 + threshold)` times those that are trained,
    rounded down (verl). A threshold that adds no whole group means 0: nothing runs ahead. Above `max_staleness` only
    `drop` can use it."""
    staleness_strategy: Literal["pace", "drop", "wait", "mask"] = "pace"
    """How the bound is kept. `pace` starts only groups that can be trained in time, and cancels the few that become too
    old. `drop` starts as many groups as engines and queue hold, and replaces those that become too old. `wait` makes
    the trainer wait for the oldest group. `mask` starts groups like pace, and leaves tokens that become too old out of
    the loss instead of cancelling their group."""
    trigger_parameter_sync_step: Positive = 1
    """Steps of the trainer between two weight syncs."""
    require_batches: Positive = 1
    """Mini-batches of `trainer.ppo_mini_batch_size` groups in one step of the trainer, which makes an optimizer step
    with each of them, in the order of their prompts."""
    partial_rollout: bool | None = None
    """What a weight sync does to groups in flight: true interrupts them, and the new version continues from the tokens
    so far within the same budget; false lets them finish under the old version first. Null is false if `pause_mode` is
    wait, else true."""
    pause_mode: Literal["keep", "abort", "wait"] | None = None
    """How an engine pauses for new weights: keep continues with the tokens and their KV cache, abort starts a new
    request from the tokens so far, wait lets requests finish first. Null is wait if `partial_rollout` is false, else
    keep."""


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["shared_memory", "object_store"] = "shared_memory"
    """`shared_memory` is a tensor file in memory that trainer and engines of one host map. `object_store` sends the
    changes through `store`, also to engines on other hosts."""
    full_every: Positive = 10
    """`object_store`: versions from one full snapshot to the next, with deltas in between; 1 always sends all
    weights."""
    timeout_s: Seconds = 300.0
    """An engine that takes longer to adopt a version is replaced, and a trainer that takes longer to publish it fails
    the run; `asynchrony.pause_mode: wait` adds `rollout.group_timeout_s`."""
    keep_prefix_cache: bool = False
    """Continue a prompt from a KV cache that older weights computed, which saves its prefill after a sync. New tokens,
    also those of held-out answers, are then sampled by a mixture of versions that the trainer cannot reproduce."""
    canary_max_gap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.5
    """Largest mean difference, in nats, between the trainer's and an engine's log-probs of the same tokens after a
    sync; a larger gap fails the run. The first sync measures how much is rounding, and lowers the bound to 0.01 plus
    ten times that. Null skips the check."""
