"""Packing: a group becomes a row, which is a tree of tokens.

The prompt of the group is the trunk, and the responses branch where their tokens first differ, so a shared prefix is
computed once. The row lists the tree depth first:

    prompt  p0 p1     responses  a b c | a d e       (the last token of a response predicts nothing: no column)

    column     0  1  2  3  4
    token      p0 p1 a  b  d        row
    position   0  1  2  3  3        distance from the root
    end        5  5  5  4  5        the subtree of column j is the columns j <= i < end[j]

Column i attends to column j if and only if i is in the subtree of j: then j is on the path from the root to i, that is,
an earlier token of the same sequence. The six response tokens are predicted from columns 1 (twice: `a` of both), 2 (`b`
and `d`), 3 and 4. Groups whose prompts share a prefix may be grafted onto one tree by the same rule.

Shapes: T columns of a row, K target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, Int32Array, Rollout, concatenate

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens that the loss is computed for; `[K]` arrays.

    Attributes:
        column: int32, the column whose output predicts the token.
        target_ids: int32, the token.
        old_log_probs: float32, its log-prob when it was sampled.
        versions: int32, the policy version that sampled it.
        advantages: float32.
        weights: float32, its weight in the sum over the optimizer step: 1, or for the aggregation "sequence" 1 over
            the number of target tokens of its rollout.
        rollout: int32, the index of its rollout among those of the optimizer step; a rollout is never split over rows.
        token: int32, its index in the response.
    """

    column: Int32Array
    target_ids: Int32Array
    old_log_probs: Float32Array
    versions: Int32Array
    advantages: Float32Array
    weights: Float32Array
    rollout: Int32Array
    token: Int32Array

    def __len__(self) -> int:
        return len(self.column)

    @classmethod
    def join(cls, parts: Sequence[Targets]) -> Targets:
        """Concatenate; the result of no parts is empty."""
        return cls(
            column=concatenate([p.column for p in parts], np.int32),
            target_ids=concatenate([p.target_ids for p in parts], np.int32),
            old_log_probs=concatenate([p.old_log_probs for p in parts], np.float32),
            versions=concatenate([p.versions for p in parts], np.int32),
            advantages=concatenate([p.advantages for p in parts], np.float32),
            weights=concatenate([p.weights for p in parts], np.float32),
            rollout=concatenate([p.rollout for p in parts], np.int32),
            token=concatenate([p.token for p in parts], np.int32),
        )


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One tree, listed depth first as the module describes.

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
        """Number of leading columns that all later columns attend to."""
        return int(np.argmin(np.append(self.ends == len(self), False)))

    def graft(self, other: PackedRow, shared: int) -> PackedRow:
        """Merge two trees whose trunks have the first `shared` columns in common."""
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
class Branch:
    """A path from the root: prompt and response up to the last token that predicts a target.

    The `column` of its targets is an index into the path.
    """

    token_ids: Int32Array
    targets: Targets


def pack_group(
    group: Group,
    advantages: Sequence[Float32Array],
    max_tokens: int,
    *,
    aggregation: Aggregation = "token",
    keep_all: bool = False,
    first: int = 0,
) -> list[PackedRow]:
    """Pack one group into a row, or into several of at most `max_tokens`, each with the prompt.

    A rollout whose advantages are all 0 has no gradient in the policy loss and is left out, although it counts in the
    denominator; `keep_all` keeps it, because a KL penalty needs every token. A single rollout that is longer than
    `max_tokens` gets its own row.

    Args:
        group: n rollouts of one prompt.
        advantages: `[R]` float32 for each rollout.
        max_tokens: bound of a row.
        aggregation: determines the weights of the targets.
        keep_all: keep rollouts without an advantage.
        first: index of the first rollout among those of the optimizer step.

    Raises:
        DataError: the prompt is empty, so no token predicts the first response token.
    """
    if len(group.prompt.token_ids) == 0:
        raise DataError(
            f"prompt {group.uid} (row {group.prompt.row}) has no tokens. Training needs at least one token before a "
            "response; remove the row."
        )
    branches = [
        branch(group.prompt.token_ids, rollout, advantage, aggregation, first + index)
        for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True))
        if rollout.loss_mask.any() and (keep_all or advantage[rollout.loss_mask != 0].any())
    ]
    branches.sort(key=lambda b: in_token_order(b.token_ids))
    return [pack_row(part) for part in split(branches, max_tokens)]


def branch(
    prompt: Int32Array, rollout: Rollout, advantages: Float32Array, aggregation: Aggregation, index: int
) -> Branch:
    """The path of a rollout with at least one unmasked token."""
    learned = np.flatnonzero(rollout.loss_mask)
    weight = 1.0 / len(learned) if aggregation == "sequence" else 1.0
    targets = Targets(
        column=(len(prompt) + learned - 1).astype(np.int32),
        target_ids=rollout.token_ids[learned],
        old_log_probs=rollout.log_probs[learned],
        versions=rollout.token_versions[learned],
        advantages=advantages[learned],
        weights=np.full(len(learned), weight, np.float32),
        rollout=np.full(len(learned), index, np.int32),
        token=learned.astype(np.int32),
    )
    return Branch(concatenate([prompt, rollout.token_ids[: learned[-1]]], np.int32), targets)


def split(branches: Sequence[Branch], max_tokens: int) -> list[list[Branch]]:
    """Split sorted branches into consecutive parts whose trees have at most `max_tokens` columns."""
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
    tokens: list[Int32Array] = []
    positions: list[Int32Array] = []
    targets: list[Targets] = []
    ends = np.zeros(sum(len(path.token_ids) for path in branches), np.int32)
    columns = np.zeros(0, np.int32)  # of the current path, from the root
    length = 0
    for index, path in enumerate(branches):
        shared = common_start(path.token_ids, branches[index - 1].token_ids) if index else 0
        ends[columns[shared:]] = length  # columns that are not shared have no more descendants
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


def common_start(one: Int32Array, other: Int32Array) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def in_token_order(token_ids: Int32Array) -> bytes:
    """Sort key: in lexicographic order, each sequence shares its longest prefix with a neighbour."""
    return token_ids.astype(">i4").tobytes()  # big-endian bytes sort like the numbers
