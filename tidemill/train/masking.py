"""Tokens that are too old to be trained, left out of the loss. Pure functions.

A response that met weight updates has tokens of several versions. Each of them keeps its own sampling log-prob, so the
young ones can be trained with the old ones as context, as if these were part of the prompt: what slime calls
`--mask-offpolicy-in-partial-rollout`, at any age instead of 0. The rewards, and so the advantages, are those of the
whole responses.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.records import Group, Rollout
from tidemill.rollout.staleness import too_old


def mask_stale(group: Group, version: int, max_staleness: int) -> Group:
    """The group with a loss mask of 0 where a token may no longer be trained at `version`; the rest as it is."""
    if not too_old(group.oldest_version, version, max_staleness):
        return group
    return replace(group, rollouts=tuple(masked(rollout, version, max_staleness) for rollout in group.rollouts))


def masked(rollout: Rollout, version: int, max_staleness: int) -> Rollout:
    """One rollout of `mask_stale`."""
    loss_mask = rollout.loss_mask.copy()
    for span in rollout.versions:
        if too_old(span.version, version, max_staleness):
            loss_mask[span.start : span.end] = 0
    return replace(rollout, loss_mask=loss_mask)
