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
    """Also bound the groups between two weight syncs to `(1 + threshold)` times those that are trained, rounded down
    (verl). One that adds no whole group is the same as 0: nothing runs ahead; above `max_staleness` only `drop` makes
    use of one."""
    staleness_strategy: Literal["pace", "drop", "wait", "mask"] = "pace"
    """What keeps the bound: pace starts only what can be trained in time and cancels the few that are overtaken, drop
    starts what engines and queue hold and replaces what became too old, wait lets the trainer wait for the oldest,
    mask starts like pace and leaves the tokens that became too old out of the loss instead of cancelling."""
    trigger_parameter_sync_step: Positive = 1
    """Steps of the trainer between two weight syncs."""
    require_batches: Positive = 1
    """Mini-batches of `trainer.ppo_mini_batch_size` groups that a step of the trainer takes at once; it makes an
    optimizer step with each of them, in the order of their prompts."""
    partial_rollout: bool | None = None
    """What a weight sync does to groups in flight: true interrupts them, and the new version goes on from the tokens
    so far within the same budget; false lets them finish under the old version first. Null is false where
    `pause_mode` is wait, else true."""
    pause_mode: Literal["keep", "abort", "wait"] | None = None
    """How an engine pauses for new weights: keep goes on with the tokens and their KV, abort starts a new request
    from the tokens so far, wait lets requests finish first. Null is wait where `partial_rollout` is false, else
    keep."""


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["shared_memory", "object_store"] = "shared_memory"
    """`shared_memory` is a tensor file in memory that trainer and engines of one host map; `object_store` brings what
    changed through `store`, also to engines on other hosts."""
    full_every: Positive = 10
    """`object_store`: a full snapshot every so many versions, deltas in between; 1 sends everything every time."""
    timeout_s: Seconds = 300.0
    """An engine that takes longer to adopt a version is replaced, and a trainer that takes longer to publish it fails
    the run; `asynchrony.pause_mode: wait` adds `rollout.group_timeout_s`."""
    keep_prefix_cache: bool = False
    """Let a prompt go on from KV that older weights computed, which saves its prefill after a sync. New tokens, also
    those of held-out answers, are then sampled by a mixture of versions that no version of the trainer computes."""
    canary_max_gap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.5
    """After every sync the trainer's and the engine's log-probs of the same tokens may differ by this much in the
    mean, in nats; a wider gap fails the run. The first sync shows how much of a gap is rounding and lowers the bound to
    0.01 plus ten times that. Null skips the check."""
