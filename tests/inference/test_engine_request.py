"""Putting a sample together from pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.errors import DataError, EngineError
from tidemill.inference.engine_request import Sample, piece_seed, prompt_log_probs, sampling_options, settled
from tidemill.protocols import Sampling
from tidemill.records import VersionSpan

SPECIAL = 256


@dataclass
class Flat:
    """Log-probs as vLLM lays them out: where each position starts in one list."""

    logprobs: list[float]
    start_indices: list[int]


@dataclass
class Piece:
    token_ids: list[int]
    logprobs: Flat | None
    weight_versions: list[Any] = field(default_factory=list)
    finish_reason: str = "abort"
    stop_reason: str | None = None


def piece(tokens: int, version: str, reason: str = "abort") -> Piece:
    spans = [SimpleNamespace(version=version, start=0, end=tokens)]
    return Piece(list(range(tokens)), Flat([-1.0] * tokens, list(range(tokens))), spans, reason)


def test_pieces_of_two_versions_make_two_spans() -> None:
    sample = Sample()
    sample.extend(piece(3, "4"))
    sample.extend(piece(2, "5", "length"))
    done = sample.completion()
    assert done.versions == (VersionSpan(4, 0, 3), VersionSpan(5, 3, 5))
    assert (done.finish_reason, len(done.log_probs)) == ("length", 5)


def test_pieces_of_one_version_make_one_span() -> None:
    sample = Sample()
    sample.extend(piece(3, "4"))
    sample.extend(piece(2, "4", "stop"))
    assert sample.completion().versions == (VersionSpan(4, 0, 5),)


def decode(token_ids: Sequence[int]) -> str:
    """Tokens are bytes, and what is above is special."""
    return bytes(token for token in token_ids if token < SPECIAL).decode(errors="replace")


def kept(*stop: str) -> Callable[[Sequence[int]], int]:
    return partial(settled, stop=stop, decode=decode)


def saying(text: bytes, version: str, reason: str = "abort", special: int = 0) -> Piece:
    tokens = [*text, *[SPECIAL] * special]
    return replace(piece(len(tokens), version, reason), token_ids=tokens)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("yes.\nE", "yes."),
        ("yes.\n", "yes."),
        ("no", "no"),
        ("yes.", "yes."),
        ("\nEN", ""),
        ("答终", "答"),
        ("答", "答"),
    ],
)
@pytest.mark.parametrize("special", [0, 2])
def test_a_stop_string_that_an_abort_cut_in_two_is_sampled_once_more(text: str, left: str, special: int) -> None:
    settle = kept("\nEND", "终于")
    sample = Sample()
    sample.extend(saying(b"yes", "4"), settle)
    sample.extend(saying(text.encode(), "5", special=special), settle)
    done, length = sample.completion(), len(left.encode()) + (special if text == left else 0)
    assert decode(done.token_ids.tolist()) == "yes" + left
    assert done.versions == (VersionSpan(4, 0, 3), *([VersionSpan(5, 3, 3 + length)] if length else []))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_character_that_an_abort_cut_is_sampled_once_more_where_there_are_stop_strings(missing: int) -> None:
    """Else vLLM's next request has the text of the prompt too, which may well speak of the stop string."""
    sample = Sample()
    sample.extend(saying("42 答".encode()[:-missing], "4"), kept("</answer>"))
    assert decode(sample.token_ids) == "42 "
    without = Sample()
    without.extend(saying("42 答".encode()[:-missing], "4"))
    assert len(without.token_ids) == 6 - missing


def test_what_is_no_text_at_all_is_not_sampled_once_more_for_ever() -> None:
    sample = Sample()
    sample.extend(saying(b"\xff" * 9, "4"), kept("</answer>"))
    assert len(sample.token_ids) == 9


def test_a_stop_string_takes_no_token_from_a_sample_that_has_ended() -> None:
    sample = Sample()
    sample.extend(saying(b"yes.\nE", "5", "length"), kept("\nEND"))
    assert len(sample.completion().token_ids) == 6


def test_what_was_cut_within_a_stop_string_only_begins_again() -> None:
    sample = Sample()
    sample.extend(saying(b"\nEN", "4"), kept("\nEND"))
    assert (sample.token_ids, sample.log_probs, sample.spans, sample.reason) == ([], [], [], "abort")


def test_an_empty_piece_leaves_no_span() -> None:
    sample = Sample()
    sample.extend(Piece([], None))
    assert sample.completion().versions == ()


def test_tokens_without_a_version_are_refused() -> None:
    sample = Sample()
    sample.extend(Piece([1], Flat([-1.0], [0]), []))
    with pytest.raises(DataError, match="version spans end at 0"):
        sample.completion()


def test_the_sampled_token_comes_before_alternatives() -> None:
    sample = Sample()
    spans = [SimpleNamespace(version="0", start=0, end=2)]
    sample.extend(Piece([7, 8], Flat([-1.0, -0.1, -2.0, -0.2], [0, 2]), spans))
    assert sample.log_probs == [-1.0, -2.0]


def test_the_first_prompt_token_has_no_log_prob() -> None:
    assert prompt_log_probs(Flat([-1.0, -2.0], [0, 0, 1])).tolist() == [-1.0, -2.0]


def test_a_failed_sample_is_an_error() -> None:
    with pytest.raises(EngineError, match="reason 'error'"):
        Sample().extend(piece(1, "0", "error"))


def test_a_sample_that_goes_on_has_the_rest_of_its_budget_and_noise_of_its_own() -> None:
    sampling = Sampling(n=4, max_tokens=10, temperature=1.0, seed=3)
    whole = [sampling_options(sampling, index, 0) for index in range(4)]
    rest = sampling_options(sampling, 2, 7)
    assert ([each["max_tokens"] for each in whole], rest["max_tokens"]) == ([10] * 4, 3)
    assert len({each["seed"] for each in [*whole, rest]}) == 5


def test_no_two_samples_or_pieces_share_noise() -> None:
    groups, samples, positions = range(5), range(4), (0, 1, 2, 300)
    asked = [Sampling(4, 500, 1.0, seed=group) for group in groups]
    drawn = [piece_seed(sampling, index, at) for sampling in asked for index in samples for at in positions]
    assert len(set(drawn)) == len(drawn) == 5 * 4 * 4
    assert piece_seed(Sampling(4, 500, 1.0), 1, 2) is None
