from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_rig import batches_of, make_group, make_rollout, random_advantages, random_groups, spread

from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, VersionSpan
from tidemill.train.batch import MicroBatch, grafted, micro_batches, step_denominator
from tidemill.train.packing import PackedRow, Targets, pack_group

ONES = np.ones(8, np.float32)


def packed(group: Group, advantages: Float32Array, max_tokens: int, **options: Any) -> list[PackedRow]:
    return pack_group(group, spread(group, advantages), max_tokens, **options)


def rows_of_length(*lengths: int) -> list[PackedRow]:
    """Chains that begin with different tokens."""
    nothing = Targets.join([])
    rows = []
    for index, length in enumerate(lengths):
        ends = np.full(length, length, np.int32)
        rows.append(PackedRow(np.full(length, index, np.int32), np.arange(length, dtype=np.int32), ends, nothing))
    return rows


def seen_by(row: PackedRow, column: int) -> list[int]:
    """Tokens that a column sees, by the rule in the documentation."""
    return [int(row.token_ids[j]) for j in range(column + 1) if column < row.ends[j]]


def sequences(row: PackedRow) -> Counter[tuple[tuple[int, ...], int]]:
    """Every target with the tokens before it."""
    targets = zip(row.targets.column, row.targets.target_ids, strict=True)
    return Counter((tuple(seen_by(row, int(column))), int(token)) for column, token in targets)


def test_the_example_of_the_documentation() -> None:
    group = make_group(0, [50, 51], make_rollout([10, 11, 12]), make_rollout([10, 13, 14]))
    (row,) = packed(group, ONES[:2], 99)
    assert row.token_ids.tolist() == [50, 51, 10, 11, 13]
    assert row.positions.tolist() == [0, 1, 2, 3, 3]
    assert row.ends.tolist() == [5, 5, 5, 4, 5]
    assert row.targets.column.tolist() == [1, 2, 3, 1, 2, 4]
    assert row.targets.target_ids.tolist() == [10, 11, 12, 10, 13, 14]


def test_a_masked_token_is_context_and_no_target() -> None:
    group = make_group(0, [50], make_rollout([10, 11, 12, 13], mask=[1, 0, 1, 0]))
    (row,) = packed(group, ONES[:1], 99)
    assert row.token_ids.tolist() == [50, 10, 11]
    assert row.targets.target_ids.tolist() == [10, 12]
    np.testing.assert_allclose(row.targets.old_log_probs, [-1.0, -1.2])
    assert sequences(row) == Counter([((50,), 10), ((50, 10, 11), 12)])


def test_every_target_keeps_the_version_that_sampled_it() -> None:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2), VersionSpan(6, 2, 3), VersionSpan(7, 3, 4))
    partial = replace(make_rollout([20, 21, 22, 23], mask=[1, 1, 0, 1]), versions=spans)
    group = make_group(0, [50], partial, make_rollout([10, 11]))
    batch = MicroBatch.of([row for copy in (group, group) for row in packed(copy, ONES[:2], 99)])
    versions = dict(zip(batch.targets.target_ids.tolist(), batch.targets.versions.tolist(), strict=True))
    assert versions == {10: 0, 11: 0, 20: 4, 21: 5, 23: 7}
    assert batch.targets.versions.dtype == np.int32


def test_equal_rollouts_are_computed_once_and_count_twice() -> None:
    group = make_group(0, [50], make_rollout([10, 11]), make_rollout([10, 11]))
    (row,) = packed(group, np.array([1, -2], np.float32), 99)
    assert row.token_ids.tolist() == [50, 10]
    assert sorted(row.targets.advantages.tolist()) == [-2, -2, 1, 1]


def test_a_group_without_advantage_costs_no_row() -> None:
    group = make_group(0, [50], make_rollout([10]), make_rollout([11]))
    zeros = np.zeros(2, np.float32)
    assert packed(group, zeros, 99) == []
    assert len(packed(group, zeros, 99, keep_all=True)) == 1


def test_sequence_weights_are_one_over_the_target_tokens() -> None:
    group = make_group(0, [50], make_rollout([10, 11, 12], mask=[1, 0, 1]), make_rollout([13]))
    (row,) = packed(group, ONES[:2], 99, aggregation="sequence")
    # The shorter path comes first in the tree.
    assert row.targets.target_ids.tolist() == [13, 10, 12]
    assert row.targets.weights.tolist() == [1.0, 0.5, 0.5]


def test_a_long_group_is_split_with_the_prompt_in_every_row() -> None:
    group = make_group(0, [50, 51], *(make_rollout([10 + i, 20 + i, 30 + i]) for i in range(5)))
    rows = packed(group, ONES[:5], 6)
    assert [len(row) for row in rows] == [6, 6, 4]
    assert all(row.token_ids[:2].tolist() == [50, 51] for row in rows)
    assert sum(len(row.targets) for row in rows) == 15


def test_a_response_longer_than_the_bound_gets_its_own_row() -> None:
    group = make_group(0, [50, 51], make_rollout(list(range(3, 12))), make_rollout([20]), make_rollout([21]))
    # The prompt alone predicts the one token of the short ones.
    assert [len(row) for row in packed(group, ONES[:3], 4)] == [2, 10]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="prompt 7"):
        packed(make_group(7, [], make_rollout([10])), ONES[:1], 9)


RESPONSES = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=6), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.lists(st.integers(3, 4), min_size=1, max_size=4), RESPONSES), min_size=1, max_size=4),
       st.integers(1, 60))  # fmt: skip
def test_every_target_attends_to_exactly_its_own_prefix(
    prompts: list[tuple[list[int], list[list[int]]]], max_tokens: int
) -> None:
    groups = [make_group(i, prompt, *map(make_rollout, responses)) for i, (prompt, responses) in enumerate(prompts)]
    rows = [row for g in groups for row in packed(g, np.ones(len(g.rollouts), np.float32), max_tokens)]
    expected = Counter(((*p, *r[:i]), r[i]) for p, responses in prompts for r in responses for i in range(len(r)))
    for tree in (rows, grafted(rows, max_tokens)):
        assert sum(map(sequences, tree), Counter()) == expected
        for row in tree:
            assert all(len(seen_by(row, c)) == row.positions[c] + 1 for c in range(len(row)))


def test_micro_batches_pad_little_and_stay_within_the_bound() -> None:
    (share,) = micro_batches(rows_of_length(3, 9, 4, 8, 3), 18, ranks=1)
    assert [batch.token_ids.shape for batch in share] == [(2, 9), (3, 4)]


def test_rows_with_a_common_prefix_are_grafted_where_that_is_cheaper() -> None:
    groups = [make_group(i, [50, 51, 60 + i], make_rollout([9, 8]), make_rollout([7, 6])) for i in range(3)]
    rows = [row for group in groups for row in packed(group, ONES[:2], 99)]
    (tree,) = grafted(rows, 99)
    assert (len(tree), tree.trunk) == (2 + 3 * 3, 2)
    assert sequences(tree) == sum(map(sequences, rows), Counter())
    assert [len(row) for row in grafted(rows, 8)] == [8, 5]


def test_long_rows_are_not_grafted_for_a_short_prefix() -> None:
    groups = [make_group(i, [50, 60 + i], make_rollout(list(range(3, 400)))) for i in range(2)]
    rows = [row for group in groups for row in packed(group, ONES[:1], 4096)]
    assert len(grafted(rows, 4096)) == 2


def test_padding_attends_only_to_itself() -> None:
    batch = MicroBatch.of(rows_of_length(1, 3))
    assert batch.ends.tolist() == [[1, 2, 3], [3, 3, 3]]


def test_ranks_get_similar_numbers_of_tokens_and_equal_numbers_of_micro_batches() -> None:
    shares = micro_batches(rows_of_length(8, 2, 2, 2, 2), 8, ranks=2)
    assert [[batch.token_ids.shape for batch in share] for share in shares] == [[(1, 8)], [(4, 2)]]
    shares = micro_batches(rows_of_length(5, 5, 5), 5, ranks=2)
    assert [[batch.token_ids.size for batch in share] for share in shares] == [[5, 5], [5, 0]]


def test_no_rows_give_no_micro_batches() -> None:
    assert micro_batches([], 8, ranks=3) == [[], [], []]


def test_the_same_groups_give_the_same_micro_batches() -> None:
    groups = random_groups(6)
    first, second = (batches_of(groups, random_advantages(groups), 40, ranks=2) for _ in range(2))
    for one, other in zip(chain(*first), chain(*second), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.targets.advantages, other.targets.advantages)


def test_predictors_are_unique() -> None:
    group = make_group(0, [50], make_rollout([10, 11]), make_rollout([12, 13]))
    batch = MicroBatch.of(packed(group, ONES[:2], 99) * 2)
    unique, inverse = batch.predictors()
    assert unique.tolist() == [0, 1, 2, 3, 4, 5]
    assert inverse.tolist() == [0, 1, 0, 2, 3, 4, 3, 5]


def masked_group() -> Group:
    return make_group(0, [50], make_rollout([10, 11, 12], mask=[1, 0, 1]), make_rollout([13], mask=[0]))


def test_the_denominator_counts_unmasked_tokens_or_sequences() -> None:
    groups = [masked_group(), make_group(1, [50], make_rollout([10, 11]), make_rollout([12]))]
    assert step_denominator(groups, "token") == 5
    assert step_denominator(groups, "sequence") == 3
