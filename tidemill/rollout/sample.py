"""Samples while they are generated, possibly in several pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.errors import EngineError
from tidemill.protocols import Sampling
from tidemill.records import Completion, FinishReason, Float32Array, VersionSpan

# A prime beyond any number of samples, so that pieces of a sample do not meet other samples.
PIECE_STRIDE = 1_000_000_007
MAX_SEED = 1 << 62
REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True)
class Sample:
    """Tokens, log-probs and version spans gathered so far.

    Attributes:
        reason: why the last piece ended; "abort" before the first, since nothing is there yet.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: FinishReason = "abort"

    def extend(self, output: Any, stop: Sequence[str] = ()) -> None:
        """Append what one vLLM request sampled (`vllm.outputs.CompletionOutput` with flat log-probs).

        vLLM looks for stop strings within a request. Where an abort may have cut one in two, what there is of it is
        left out, to be sampled once more.

        Raises:
            EngineError: vLLM reports a failure, or does not say which version a token came from.
        """
        if output.finish_reason not in REASONS:
            raise EngineError(f"vLLM ended a sample with reason {output.finish_reason!r}: {output.stop_reason}")
        self.reason = REASONS[output.finish_reason]
        begun = unfinished_stop(output.text, stop) if self.reason == "abort" else 0
        start, count = len(self.token_ids), max(0, len(output.token_ids) - begun)  # no token is less than a character
        self.token_ids.extend(output.token_ids[:count])
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
        """As arrays, checked for alignment."""
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            versions=tuple(self.spans),
            finish_reason=self.reason,
        )


@dataclass(slots=True, eq=False)
class Flight:
    """A request that the engine answers for.

    Attributes:
        place: in the order in which vLLM serves; the smallest comes first.
        aborted: the caller gave it up.
        submitted: names of the requests that vLLM holds for it now, one a sample.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    place: int
    samples: list[Sample] = field(default_factory=list)
    aborted: bool = False
    submitted: set[str] = field(default_factory=set)


def sampling_options(sampling: Sampling, index: int, position: int) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for the sample `index` of a request, which stands at token `position`."""
    return {
        "max_tokens": sampling.max_tokens - position,
        "temperature": sampling.temperature,
        "seed": piece_seed(sampling, index, position),
        "stop": list(sampling.stop) or None,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
    }


def piece_seed(sampling: Sampling, index: int, position: int) -> int | None:
    """Seed of the sample `index` that stands at token `position`.

    No two samples of any two groups, and no two pieces of a sample, share noise.
    """
    if sampling.seed is None:
        return None
    return (sampling.seed * sampling.n + index + position * PIECE_STRIDE) % MAX_SEED


def unfinished_stop(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of a text with which a stop string may have begun."""
    return max((n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0)


def sampled_log_probs(flat: Any) -> list[float]:
    """The log-prob of the token that was taken at each position: vLLM puts it first, before any alternatives."""
    return [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]


def prompt_log_probs(flat: Any) -> Float32Array:
    """`[T-1]` float32 from vLLM's prompt log-probs of T tokens, whose first position is empty."""
    starts: Sequence[int] = flat.start_indices[1:]
    return np.array([flat.logprobs[start] for start in starts], dtype=np.float32)
