from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from tidemill import errors
from tidemill.errors import ConfigError, DataError, TidemillError
from tidemill.records import Completion, Group, Prompt, Rollout, VersionSpan, concatenate

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def rollout(tokens: int = 2, versions: tuple[VersionSpan, ...] | None = None, reward: float = 1.0) -> Rollout:
    return Rollout(
        token_ids=np.arange(tokens, dtype=np.int32),
        log_probs=np.full(tokens, -0.5, dtype=np.float32),
        loss_mask=np.ones(tokens, dtype=np.float32),
        versions=(VersionSpan(4, 0, tokens),) if versions is None else versions,
        finish_reason="stop",
        text="5",
        reward=reward,
        reward_parts={"exact_number": reward},
        seconds=0.25,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(Prompt(17, 3, np.array([1, 9, 4], dtype=np.int32), "Compute 3 + 4.", "7", {"level": 1}), rollouts)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    cuts = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=4)))
    spans = tuple(VersionSpan(n, a, b) for n, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False)))
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return Rollout(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=cuts[-1], max_size=cuts[-1])), np.int32),
        log_probs=np.array(draw(st.lists(floats, min_size=cuts[-1], max_size=cuts[-1])), np.float32),
        loss_mask=np.ones(cuts[-1], np.float32),
        versions=spans,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(st.text(max_size=8)),
        reward=draw(st.floats(allow_nan=False)),
        reward_parts=draw(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=2)),
        seconds=draw(st.floats(0, 1e6)),
    )


def same(left: Group, right: Group) -> bool:
    """Equal in every value, bit for bit, and every dtype."""
    arrays = [(left.prompt.token_ids, right.prompt.token_ids)]
    for a, b in zip(left.rollouts, right.rollouts, strict=True):
        arrays += [(a.token_ids, b.token_ids), (a.log_probs, b.log_probs), (a.loss_mask, b.loss_mask)]
    return left.to_bytes() == right.to_bytes() and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(rollouts(), max_size=3), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3))
def test_group_survives_its_encoding(members: list[Rollout], extra: dict[str, object]) -> None:
    prompt = Prompt(5, 1, np.array([1, 2], np.int32), "text \N{GREEK SMALL LETTER PI}", None, extra)
    original = Group(prompt, tuple(members))
    decoded = Group.from_bytes(original.to_bytes())
    assert same(original, decoded)
    assert dict(decoded.prompt.extra) == extra


def test_header_says_what_the_queue_needs() -> None:
    header = group(rollout(2), rollout(3)).header(nbytes=99, usable_version=6)
    assert (header.uid, header.oldest_version, header.usable_version) == (17, 4, 6)
    assert (header.tokens, header.nbytes) == (8, 99)


def test_oldest_and_newest_version_are_those_of_any_token() -> None:
    mixed = rollout(3, (VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)))
    assert (group(rollout(2), mixed).oldest_version, group(rollout(2), mixed).newest_version) == (3, 5)


def test_age_is_that_of_the_oldest_token_that_the_loss_counts() -> None:
    mixed = rollout(4, (VersionSpan(3, 0, 1), VersionSpan(5, 1, 3), VersionSpan(6, 3, 4)))
    assert group(mixed).age(7) == 4
    partly = replace(mixed, loss_mask=np.array([0, 0, 1, 1], np.float32))
    assert (group(partly).age(7), group(partly).trained_tokens) == (2, 2)
    assert dict(partly.trained_by_version) == {5: 1, 6: 1}
    again = rollout(4, (VersionSpan(3, 0, 1), VersionSpan(5, 1, 2), VersionSpan(5, 2, 4)))
    assert dict(again.trained_by_version) == {3: 1, 5: 3}
    nothing = replace(mixed, loss_mask=np.zeros(4, np.float32))
    assert (group(nothing).age(7), group(nothing).trained_tokens) == (0, 0)


def test_rewards_are_one_float32_per_rollout() -> None:
    rewards = group(rollout(reward=1.0), rollout(reward=0.25)).rewards
    assert (rewards.dtype, rewards.tolist()) == (np.float32, [1.0, 0.25])


def test_nothing_concatenates_to_an_empty_array_of_the_wire_type() -> None:
    assert concatenate([], np.int32).dtype == np.int32


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"not a group",
        pickle.dumps({"group": 1}),
        save({"prompt": np.zeros(1, np.int32)}),
        save({"prompt": np.zeros(1, np.int32)}, metadata={"group": json.dumps({"prompt": {}, "rollouts": []})}),
        group(rollout()).to_bytes()[:-4],
    ],
)
def test_what_is_no_group_is_refused(blob: bytes) -> None:
    with pytest.raises(DataError, match="not an encoded group"):
        Group.from_bytes(blob)


def test_lengths_that_lie_are_refused() -> None:
    blob = group(rollout(2)).to_bytes().replace(b'"length": 2', b'"length": 1')
    with pytest.raises(DataError, match="not an encoded group"):
        Group.from_bytes(blob)


def test_log_probs_must_be_as_many_as_tokens() -> None:
    with pytest.raises(DataError, match="1 log-probs for 2 tokens"):
        Completion(np.zeros(2, np.int32), np.zeros(1, np.float32), (VersionSpan(0, 0, 2),), "stop")


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan(0, 0, 1),),
        (VersionSpan(0, 0, 3),),
        (VersionSpan(0, 1, 2),),
        (VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)),
        (VersionSpan(0, 0, 3), VersionSpan(1, 3, 2)),
    ],
)
def test_spans_must_cover_the_tokens_without_gap_or_overlap(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(DataError, match="version spans"):
        rollout(2, spans)


def test_loss_mask_must_be_as_long_as_the_tokens() -> None:
    with pytest.raises(DataError, match="loss mask of 1 for 2 tokens"):
        Rollout(
            np.zeros(2, np.int32),
            np.zeros(2, np.float32),
            np.ones(1, np.float32),
            (VersionSpan(0, 0, 2),),
            "stop",
            "",
            0.0,
            {},
            0.0,
        )


def all_errors() -> list[type[TidemillError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TidemillError)]
    return [kind for kind in kinds if kind is not ConfigError]


@pytest.mark.parametrize("kind", all_errors())
def test_error_survives_pickling(kind: type[TidemillError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what happened")))  # noqa: S301 - our own bytes, made on this line
    assert (type(copy), str(copy)) == (kind, "what happened")


def test_config_error_survives_pickling_with_its_parts() -> None:
    error = ConfigError("trainer.steps", 0, "at least 1", "Raise it.")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes, made on the line above
    assert (copy.key, copy.value, str(copy)) == ("trainer.steps", 0, str(error))
