"""From groups to micro-batches: the loss mask, and packed rows distributed over ranks and stacked.

Shapes: B rows of T columns, K target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tidemill.records import Group, Int32Array, Rollout
from tidemill.rollout.staleness import too_old
from tidemill.train.packing import Aggregation, PackedRow, Targets, common_start, in_token_order

# Cost of a column besides attention, in columns attended to. By operations it is about 5 times the hidden size; dense
# attention is slower per operation, so it is less here.
COLUMN_COST = 1024


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        token_ids, positions, ends: `[B, T]` int32; a padding column attends only to itself.
        row: `[K]` int32, the row of each target.
        targets: of all rows, concatenated.
    """

    token_ids: Int32Array
    positions: Int32Array
    ends: Int32Array
    row: Int32Array
    targets: Targets

    @classmethod
    def of(cls, rows: Sequence[PackedRow]) -> MicroBatch:
        """Pad rows to the longest one; without rows the micro-batch is empty and costs nothing."""
        width = max((len(row) for row in rows), default=0)
        token_ids, positions = np.zeros((2, len(rows), width), np.int32)
        ends = np.tile(np.arange(1, width + 1, dtype=np.int32), (len(rows), 1))
        for index, row in enumerate(rows):
            token_ids[index, : len(row)] = row.token_ids
            positions[index, : len(row)] = row.positions
            ends[index, : len(row)] = row.ends
        counts = [len(row.targets) for row in rows]
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        return cls(token_ids, positions, ends, owner, Targets.join([row.targets for row in rows]))

    @classmethod
    def idle(cls) -> MicroBatch:
        """One token whose loss and gradient are exactly 0."""
        zero, floats = np.zeros(1, np.int32), np.zeros(1, np.float32)
        targets = Targets(zero, zero, floats, zero, floats, floats, zero, zero)
        return cls(zero[None], zero[None], zero[None] + np.int32(1), zero, targets)

    def predictors(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The unique indices into `[B * T]` that predict a target, and for each target the position among them."""
        flat = self.row.astype(np.int64) * self.token_ids.shape[1] + self.targets.column
        unique, inverse = np.unique(flat, return_inverse=True)
        return unique, inverse.astype(np.int64)


def micro_batches(rows: Sequence[PackedRow], max_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    """Distribute rows over ranks and stack them into micro-batches.

    Rows go longest first to the rank with the fewest tokens so far (LPT; Graham 1969, doi:10.1137/0117039). Each rank
    grafts rows with a common prefix onto each other where that saves work, then stacks rows of similar length while
    `B * T` stays within `max_tokens`. All ranks get the same number of micro-batches, padded with empty ones. The
    result is deterministic.

    Args:
        rows: of the whole optimizer step.
        max_tokens: bound of a micro-batch with padding; a longer row gets its own micro-batch.
        ranks: data-parallel ranks; each gets one list.
    """
    shares: list[list[PackedRow]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=len, reverse=True):
        lightest = tokens.index(min(tokens))
        shares[lightest].append(row)
        tokens[lightest] += len(row)
    batches = [[MicroBatch.of(stack) for stack in stacks(grafted(share, max_tokens), max_tokens)] for share in shares]
    count = max(len(share) for share in batches)
    return [share + [MicroBatch.of([])] * (count - len(share)) for share in batches]


def grafted(rows: Sequence[PackedRow], max_tokens: int) -> list[PackedRow]:
    """Graft rows onto rows with the same prefix (a system prompt) where that is cheaper and fits; longest first.

    A row of T columns costs about `T * (COLUMN_COST + T)`: attention is dense, so long rows are expensive.
    """
    joined: list[PackedRow] = []
    for row in sorted(rows, key=lambda r: in_token_order(r.token_ids)):
        if joined:
            shared = min(common_start(joined[-1].token_ids, row.token_ids), joined[-1].trunk, row.trunk)
            length = len(joined[-1]) + len(row) - shared
            dearer = length**2 - len(joined[-1]) ** 2 - len(row) ** 2
            if length <= max_tokens and dearer < COLUMN_COST * shared:
                joined[-1] = joined[-1].graft(row, shared)
                continue
        joined.append(row)
    return sorted(joined, key=len, reverse=True)


def stacks(rows: Sequence[PackedRow], max_tokens: int) -> list[list[PackedRow]]:
    """Split rows, sorted longest first, into parts that fit `max_tokens` when padded to their first row."""
    parts: list[list[PackedRow]] = []
    for row in rows:
        if parts and len(parts[-1][0]) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def step_denominator(groups: Sequence[Group], aggregation: Aggregation, max_new_tokens: int = 1) -> float:
    """The denominator of the losses of one optimizer step, over all ranks and micro-batches.

        token         sum over tokens / number of unmasked response tokens
        sequence      sum over rollouts of the mean over their tokens / number of rollouts
        sequence_sum  sum over tokens / number of rollouts
        constant      sum over tokens / (number of rollouts * max_new_tokens); Dr. GRPO, Liu et al. 2025,
                      arXiv:2503.20783

    A rollout counts if it has an unmasked token. Rollouts without a gradient count too, so leaving them out of the rows
    changes nothing.
    """
    learned = [np.count_nonzero(rollout.loss_mask) for group in groups for rollout in group.rollouts]
    if aggregation == "token":
        return float(sum(learned))
    return float(np.count_nonzero(learned) * (max_new_tokens if aggregation == "constant" else 1))


def mask_stale(group: Group, version: int, max_staleness: int) -> Group:
    """The group with a loss mask of 0 on every token that is too old to be trained at `version`.

    A response that was sampled while weights changed has tokens of several versions, each with its own sampling
    log-prob. The recent tokens are trained with the old ones as context, as if these were part of the prompt. slime
    calls this `--mask-offpolicy-in-partial-rollout`; there the largest age is 0, here it is `max_staleness`. Rewards
    and advantages are those of the whole responses.
    """
    if not too_old(group.oldest_version, version, max_staleness):
        return group
    return replace(group, rollouts=tuple(masked(rollout, version, max_staleness) for rollout in group.rollouts))


def masked(rollout: Rollout, version: int, max_staleness: int) -> Rollout:
    """The rollout with a loss mask of 0 on the tokens that are too old."""
    loss_mask = rollout.loss_mask.copy()
    for span in rollout.versions:
        if too_old(span.version, version, max_staleness):
            loss_mask[span.start : span.end] = 0
    return replace(rollout, loss_mask=loss_mask)
