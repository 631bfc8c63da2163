"""A request of the engine, and its samples while they are generated, possibly in several pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.errors import EngineError
from tidemill.protocols import Sampling
from tidemill.records import Completion, FinishReason, Float32Array, VersionSpan

# A prime beyond any number of samples, so that pieces of a sample do not meet other samples.
PIECE_STRIDE = 1_000_000_007
MAX_SEED = 1 << 62
UTF8_BYTES = 4  # of the longest character
NO_CHARACTER = "\ufffd"  # what bytes that are no whole character are decoded to
Decode = Callable[[Sequence[int]], str]
REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True)
class Sample:
    """Tokens, log-probs and version spans gathered so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: FinishReason = "abort"  # why the last piece ended; "abort" before the first one

    def extend(self, output: Any, kept: Callable[[Sequence[int]], int] = len) -> None:
        """Append what one vLLM request sampled (`vllm.outputs.CompletionOutput` with flat log-probs).

        Raises:
            EngineError: vLLM reports a failure, or does not say which version a token came from.
        """
        if output.finish_reason not in REASONS:
            raise EngineError(f"vLLM ended a sample with reason {output.finish_reason!r}: {output.stop_reason}")
        self.reason = REASONS[output.finish_reason]
        tokens: Sequence[int] = output.token_ids
        start, count = len(self.token_ids), kept(tokens) if self.reason == "abort" else len(tokens)
        self.token_ids.extend(tokens[:count])
        self.log_probs.extend(sampled_log_probs(output.logprobs)[:count])
        for span in output.weight_versions or ():
            self._add_span(int(span.version), start + span.start, start + min(span.end, count))

    def _add_span(self, version: int, start: int, end: int) -> None:
        if start >= end:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))

    def completion(self) -> Completion:
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            versions=tuple(self.spans),
            finish_reason=self.reason,
        )


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request to the engine, which vLLM gets as one request a sample."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    priority: int  # vLLM serves the smallest first
    samples: list[Sample] = field(default_factory=list)
    aborted: bool = False
    submitted: set[str] = field(default_factory=set)  # ids of the requests that vLLM holds for it now


def sampling_options(sampling: Sampling, index: int, position: int) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for sample `index` of a request, from token `position` on."""
    return {
        "max_tokens": sampling.max_tokens - position,
        "temperature": sampling.temperature,
        "seed": piece_seed(sampling, index, position),
        "stop": list(sampling.stop) or None,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
    }


def piece_seed(sampling: Sampling, index: int, position: int) -> int | None:
    """Seed of sample `index` from token `position` on.

    No two samples of any two groups, and no two pieces of a sample, share noise.
    """
    if sampling.seed is None:
        return None
    return (sampling.seed * sampling.n + index + position * PIECE_STRIDE) % MAX_SEED


def settled(token_ids: Sequence[int], *, stop: Sequence[str], decode: Decode) -> int:
    """How many of the first tokens have a text that ends neither within a character nor within a stop string.

    vLLM looks for stop strings in the text of one request, so it would miss one that is cut in two. After a cut within
    a character the text of the next request includes its prompt, and vLLM would find stop strings in there.
    """
    tail = UTF8_BYTES * max(map(len, stop))  # no token that has a text is less than a byte

    def text(count: int) -> str:
        return decode(token_ids[max(0, count - tail) : count])

    count = whole_characters(len(token_ids), text)
    while count and begins_stop(text(count), stop):
        count = whole_characters(count - 1, text)
    return count


def whole_characters(count: int, text: Callable[[int], str]) -> int:
    """The same count or a little less, so that its text does not end within a character.

    If more than the bytes of one character are missing, the model samples no valid text, and the count stays.
    """
    fewer = range(count, max(count - UTF8_BYTES, -1), -1)
    return next((n for n in fewer if not text(n).endswith(NO_CHARACTER)), count)


def begins_stop(text: str, stop: Sequence[str]) -> bool:
    return any(text.endswith(word[:n]) for word in stop for n in range(1, len(word)))


def sampled_log_probs(flat: Any) -> list[float]:
    """The log-prob of the token that was taken at each position: vLLM puts it first, before any alternatives."""
    return [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]


def prompt_log_probs(flat: Any) -> Float32Array:
    """`[T-1]` float32 from vLLM's prompt log-probs of T tokens, whose first position is empty."""
    starts: Sequence[int] = flat.start_indices[1:]
    return np.array([flat.logprobs[start] for start in starts], dtype=np.float32)
