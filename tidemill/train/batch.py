"""Packing: groups become rows, rows become micro-batches.

A group is packed as one tree. Its prompt is the trunk, and its responses branch where their tokens first differ, so
what several responses share is computed once. The row lists the tree depth first:

    prompt  p0 p1     responses  a b c | a d e       (the last token of a response predicts nothing and is left out)

    column     0  1  2  3  4
    token      p0 p1 a  b  d        row
    position   0  1  2  3  3        distance from the root
    end        5  5  5  4  5        the subtree of column j is the columns j <= i < end[j]

Column i may see column j exactly if i lies in the subtree of j: then j is on the path from the root to i, that is, a
token of the same sequence that stands before it. The five response tokens are predicted from columns 1 (twice: `a` of
both), 2 (`b` and `d`), 3 and 4. Groups whose prompts begin alike may be grafted onto one tree by the same rule.

Shapes: T columns of a row, K target tokens, B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, Int32Array, Rollout, concatenate

Aggregation = Literal["token", "sequence"]
# What a column costs besides attention, in columns it could attend to instead; about 5 times the hidden size in
# operations, and less here because dense attention is slower per operation.
COLUMN_COST = 1024


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens that a loss is computed for; `[K]` arrays.

    Attributes:
        column: int32, the column whose output predicts the token.
        target_ids: int32, the token.
        old_log_probs: float32, its log-prob when it was sampled.
        advantages: float32, of its rollout.
        weights: float32, its weight in the sum over the optimizer step: 1, or for the aggregation "sequence" one
            over the number of target tokens of its rollout.
    """

    column: Int32Array
    target_ids: Int32Array
    old_log_probs: Float32Array
    advantages: Float32Array
    weights: Float32Array

    def __len__(self) -> int:
        return len(self.column)

    @classmethod
    def join(cls, parts: Sequence[Targets]) -> Targets:
        """Concatenate, also of nothing."""
        return cls(
            column=concatenate([p.column for p in parts], np.int32),
            target_ids=concatenate([p.target_ids for p in parts], np.int32),
            old_log_probs=concatenate([p.old_log_probs for p in parts], np.float32),
            advantages=concatenate([p.advantages for p in parts], np.float32),
            weights=concatenate([p.weights for p in parts], np.float32),
        )


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One tree, listed depth first; see the module's docstring.

    Attributes:
        token_ids, positions, ends: `[T]` int32.
        targets: what is predicted in this row.
    """

    token_ids: Int32Array
    positions: Int32Array
    ends: Int32Array
    targets: Targets

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trunk(self) -> int:
        """How many leading columns all later columns see."""
        return int(np.argmin(np.append(self.ends == len(self), False)))

    def graft(self, other: PackedRow, shared: int) -> PackedRow:
        """One tree out of two whose trunks have the first `shared` columns in common."""
        shift = len(self) - shared
        ends = np.concatenate([self.ends, other.ends[shared:] + np.int32(shift)])
        ends[:shared] = len(ends)
        column = other.targets.column
        moved = replace(other.targets, column=np.where(column < shared, column, column + np.int32(shift)))
        return PackedRow(
            concatenate([self.token_ids, other.token_ids[shared:]], np.int32),
            concatenate([self.positions, other.positions[shared:]], np.int32),
            ends,
            Targets.join([self.targets, moved]),
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass computes.

    Attributes:
        token_ids, positions, ends: `[B, T]` int32; a padding column sees itself only.
        row: `[K]` int32, the row of each target.
        targets: of all rows, one after the other.
    """

    token_ids: Int32Array
    positions: Int32Array
    ends: Int32Array
    row: Int32Array
    targets: Targets

    @classmethod
    def of(cls, rows: Sequence[PackedRow]) -> MicroBatch:
        """Pad rows to the longest; no rows give an empty micro-batch, which costs nothing."""
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

    def predictors(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices into `[B * T]` of the columns whose output is needed, each once; and which of them a target needs."""
        flat = self.row.astype(np.int64) * self.token_ids.shape[1] + self.targets.column
        unique, inverse = np.unique(flat, return_inverse=True)
        return unique, inverse.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path from the root: prompt and response up to the last token that predicts something.

    The `column` of its targets counts along the path.
    """

    token_ids: Int32Array
    targets: Targets


def pack_group(
    group: Group,
    advantages: Float32Array,
    max_tokens: int,
    *,
    aggregation: Aggregation = "token",
    keep_all: bool = False,
) -> list[PackedRow]:
    """Pack one group into a row, or into several of at most `max_tokens`, each with the prompt.

    A rollout of advantage 0 has no gradient in the policy loss and is left out (it counts in the denominator all the
    same), unless `keep_all` asks for it because a KL penalty needs every token. A single rollout that is longer than
    `max_tokens` gets a row of its own.

    Args:
        group: n rollouts of one prompt.
        advantages: `[n]` float32.
        max_tokens: bound of a row.
        aggregation: sets the weights of the targets.
        keep_all: for a KL penalty.

    Raises:
        DataError: the prompt is empty, so nothing predicts the first response token.
    """
    if len(group.prompt.token_ids) == 0:
        raise DataError(f"prompt {group.uid} (row {group.prompt.row}) has no tokens; a response needs one before it")
    branches = [
        branch(group.prompt.token_ids, rollout, advantage, aggregation)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        if rollout.loss_mask.any() and (keep_all or advantage != 0)
    ]
    branches.sort(key=lambda b: in_token_order(b.token_ids))
    return [pack_row(part) for part in split(branches, max_tokens)]


def branch(prompt: Int32Array, rollout: Rollout, advantage: np.float32, aggregation: Aggregation) -> Branch:
    """The path of one rollout that has at least one token to learn from."""
    learned = np.flatnonzero(rollout.loss_mask)
    weight = 1.0 if aggregation == "token" else 1.0 / len(learned)
    targets = Targets(
        column=(len(prompt) + learned - 1).astype(np.int32),
        target_ids=rollout.token_ids[learned],
        old_log_probs=rollout.log_probs[learned],
        advantages=np.full(len(learned), advantage, np.float32),
        weights=np.full(len(learned), weight, np.float32),
    )
    return Branch(concatenate([prompt, rollout.token_ids[: learned[-1]]], np.int32), targets)


def split(branches: Sequence[Branch], max_tokens: int) -> list[list[Branch]]:
    """Cut sorted branches into consecutive parts whose trees have at most `max_tokens` columns."""
    parts: list[list[Branch]] = []
    columns = 0
    for path in branches:
        added = len(path.token_ids) - (common_start(path.token_ids, parts[-1][-1].token_ids) if parts else 0)
        if parts and columns + added <= max_tokens:
            parts[-1].append(path)
            columns += added
        else:
            parts.append([path])
            columns = len(path.token_ids)
    return parts


def pack_row(branches: Sequence[Branch]) -> PackedRow:
    """List the tree of sorted branches depth first."""
    tokens: list[Int32Array] = []
    positions: list[Int32Array] = []
    targets: list[Targets] = []
    ends = np.zeros(sum(len(path.token_ids) for path in branches), np.int32)
    columns = np.zeros(0, np.int32)  # of the present path, from the root
    length = 0
    for index, path in enumerate(branches):
        shared = common_start(path.token_ids, branches[index - 1].token_ids) if index else 0
        ends[columns[shared:]] = length  # what is not shared has no more descendants
        fresh = np.arange(shared, len(path.token_ids), dtype=np.int32)
        tokens.append(path.token_ids[shared:])
        positions.append(fresh)
        columns = concatenate([columns[:shared], fresh - shared + length], np.int32)
        targets.append(replace(path.targets, column=columns[path.targets.column]))
        length += len(fresh)
    ends[columns] = length
    return PackedRow(
        concatenate(tokens, np.int32), concatenate(positions, np.int32), ends[:length], Targets.join(targets)
    )


def micro_batches(rows: Sequence[PackedRow], max_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    """Share rows out to ranks and stack them to micro-batches.

    Rows go longest first to the rank with the fewest tokens so far (LPT; Graham 1969, doi:10.1137/0117039). Each rank
    grafts rows that begin alike onto each other where that saves work, then stacks rows of similar length while
    `B * T` stays within `max_tokens`. All ranks get the same number of micro-batches, if need be empty ones. The same
    rows in the same order always give the same micro-batches.

    Args:
        rows: of the whole optimizer step.
        max_tokens: bound of a micro-batch, padding included; a longer row goes alone.
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
    """Graft rows onto rows with the same beginning (a system prompt) while that is cheaper and fits; longest first.

    A row of T columns costs about `T * (COLUMN_COST + T)`: attention is computed densely, so long rows are dear.
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
    """Cut rows, sorted longest first, into parts that `max_tokens` holds when padded to their first row."""
    parts: list[list[PackedRow]] = []
    for row in rows:
        if parts and len(parts[-1][0]) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def common_start(one: Int32Array, other: Int32Array) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def in_token_order(token_ids: Int32Array) -> bytes:
    """Sort key: in lexicographic order each sequence shares the most with its neighbours."""
    return token_ids.astype(">i4").tobytes()  # big-endian bytes order as the numbers do


def step_denominator(groups: Sequence[Group], aggregation: Aggregation) -> float:
    """What the losses of one optimizer step are divided by, over all ranks and micro-batches.

    It counts every rollout of the step, also those without a gradient, so that leaving them out of the rows changes
    nothing: the response tokens to learn from ("token"), or the rollouts with any of them ("sequence").
    """
    learned = [np.count_nonzero(rollout.loss_mask) for group in groups for rollout in group.rollouts]
    return float(sum(learned) if aggregation == "token" else np.count_nonzero(learned))
