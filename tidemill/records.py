"""The data that crosses a boundary between two parts of a run.

Worked example: the prompt "Compute 3 + 4." is dispatched as occurrence 17; its group holds two rollouts

    Group(
        prompt=Prompt(uid=17, row=3, token_ids=[1, 9, 4], ...),
        rollouts=(
            Rollout(token_ids=[5, 2], log_probs=[-0.1, -0.2], versions=(VersionSpan(4, 0, 2),), reward=1.0, ...),
            Rollout(token_ids=[6, 6, 2], ..., versions=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)), reward=0.0),
        ),
    )

The second rollout got a weight update after its first token. `group.age(5)` is 1, the age of its oldest tokens.

Arrays are numpy (int32 ids, float32 log-probs); on the wire a group is one safetensors blob, which cannot carry code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from tidemill.errors import DataError

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Buffer: TypeAlias = "bytes | NDArray[np.uint8]"  # an encoded group, in memory of this process or in shared memory
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, order=True)
class EngineId:
    """Names an engine; unique in a run, because the engine that replaces a lost one gets the next number."""

    number: int

    def __str__(self) -> str:
        return f"engine {self.number}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One occurrence of a dataset row: row 3 occurs once in every epoch, each time as another prompt.

    Attributes:
        uid: ordinal of the occurrence in the prompt stream, unique in a run and stable over restarts.
        row: index of the dataset row.
        token_ids: `[P]` int32, the rendered chat prompt as the engine receives it.
        text: what the user asked, for rewards and reports.
        answer: the reference answer, if the data has one.
        extra: the row's other columns (JSON values), passed to reward functions.
    """

    uid: int
    row: int
    token_ids: Int32Array
    text: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of an engine: tokens in, tokens out.

    Attributes:
        token_ids: `[R]` int32, the sampled tokens, end-of-sequence token included.
        log_probs: `[R]` float32, natural log of the probability each token was sampled with.
        versions: contiguous spans that cover `[0, R)`.
        finish_reason: "stop" (end-of-sequence or stop string), "length" (budget used up) or "abort".
    """

    token_ids: Int32Array
    log_probs: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        check_aligned(self.token_ids, self.log_probs, self.versions)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward.

    Attributes:
        token_ids, log_probs, versions, finish_reason: as in `Completion`.
        loss_mask: `[R]` float32, 1 for tokens of the policy, 0 for tokens of a tool or an environment.
        text: the decoded response, special tokens left out.
        reward: weighted sum of `reward_parts`.
        reward_parts: value of every reward function by name.
        seconds: wall time from dispatch to reward.
    """

    token_ids: Int32Array
    log_probs: Float32Array
    loss_mask: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str
    reward: float
    reward_parts: Mapping[str, float]
    seconds: float

    def __post_init__(self) -> None:
        check_aligned(self.token_ids, self.log_probs, self.versions)
        if len(self.loss_mask) != len(self.token_ids):
            raise DataError(f"loss mask of {len(self.loss_mask)} for {len(self.token_ids)} tokens")

    @property
    def token_versions(self) -> Int32Array:
        """`[R]` int32, the policy version that sampled each token."""
        return concatenate([np.full(span.end - span.start, span.version) for span in self.versions], np.int32)

    @property
    def trained_by_version(self) -> Counter[int]:
        """How many tokens the loss counts, by the policy version that sampled them."""
        counts: Counter[int] = Counter()
        for span in self.versions:
            counts[span.version] += int(np.count_nonzero(self.loss_mask[span.start : span.end]))
        return +counts


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What the queue knows of a group without opening it.

    Attributes:
        uid: of the occurrence.
        oldest_version: of any token; what is oldest is trained first.
        usable_version: the group is of use until this version is too old, see `StalenessPolicy.usable_version`.
        tokens: of the prompt and all responses.
        nbytes: of the encoded group.
    """

    uid: int
    oldest_version: int
    usable_version: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """The n rollouts of one prompt: the unit of dispatch, queueing, staleness, training and accounting."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def uid(self) -> int:
        """Ordinal of the prompt occurrence."""
        return self.prompt.uid

    @property
    def oldest_version(self) -> int:
        """The oldest policy version of any token."""
        return min(span.version for rollout in self.rollouts for span in rollout.versions)

    @property
    def newest_version(self) -> int:
        """The newest policy version of any token."""
        return max(span.version for rollout in self.rollouts for span in rollout.versions)

    @property
    def trained_tokens(self) -> int:
        """Response tokens that the loss counts."""
        return sum(rollout.trained_by_version.total() for rollout in self.rollouts)

    def age(self, version: int) -> int:
        """Versions between `version` and the oldest token that the loss counts; 0 if it counts none."""
        return max((version - v for rollout in self.rollouts for v in rollout.trained_by_version), default=0)

    @property
    def rewards(self) -> Float32Array:
        """`[n]` float32."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float32)

    @property
    def response_tokens(self) -> int:
        """Sum of the response lengths."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    def header(self, nbytes: int, usable_version: int) -> GroupHeader:
        """The queue's view of this group, whose encoded size is `nbytes`."""
        tokens = len(self.prompt.token_ids) + self.response_tokens
        return GroupHeader(self.uid, self.oldest_version, usable_version, tokens, nbytes)

    def to_bytes(self) -> bytes:
        """Encode as one safetensors blob: four arrays and a JSON header."""
        arrays = {
            "prompt": self.prompt.token_ids,
            "tokens": concatenate([r.token_ids for r in self.rollouts], np.int32),
            "log_probs": concatenate([r.log_probs for r in self.rollouts], np.float32),
            "loss_mask": concatenate([r.loss_mask for r in self.rollouts], np.float32),
        }
        p = self.prompt
        prompt = {"uid": p.uid, "row": p.row, "text": p.text, "answer": p.answer, "extra": dict(p.extra)}
        header = {"prompt": prompt, "rollouts": [rollout_header(r) for r in self.rollouts]}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        blob: bytes = save_arrays(arrays)
        return blob

    @classmethod
    def from_bytes(cls, blob: Buffer) -> Group:
        """Decode the result of `to_bytes`; the group keeps no reference to `blob`, which may be shared memory.

        Raises:
            DataError: the blob is not an encoded group.
        """
        try:
            arrays = load_arrays(bytes(blob))
            header = json.loads(arrays["header"].tobytes())
            prompt = Prompt(token_ids=arrays["prompt"], **header["prompt"])
            return cls(prompt, tuple(decode_rollouts(arrays, header["rollouts"])))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"not an encoded group: {error}") from error


def check_aligned(token_ids: Int32Array, log_probs: Float32Array, versions: Sequence[VersionSpan]) -> None:
    """Refuse arrays of different lengths, and spans that do not cover the tokens exactly.

    Raises:
        DataError: naming both values.
    """
    if len(log_probs) != len(token_ids):
        raise DataError(f"{len(log_probs)} log-probs for {len(token_ids)} tokens")
    position = 0
    for span in versions:
        if span.start != position or span.end < span.start:
            raise DataError(f"version spans {tuple(versions)} are not contiguous")
        position = span.end
    if position != len(token_ids):
        raise DataError(f"version spans end at {position}, tokens at {len(token_ids)}")


def concatenate(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate any number of arrays; the dtype is that of the wire format."""
    joined: NDArray[Any] = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
    return joined


def rollout_header(rollout: Rollout) -> dict[str, Any]:
    """The JSON part of a rollout, without its arrays."""
    return {
        "length": len(rollout.token_ids),
        "versions": [asdict(span) for span in rollout.versions],
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "seconds": rollout.seconds,
    }


def decode_rollouts(arrays: Mapping[str, NDArray[Any]], headers: Sequence[dict[str, Any]]) -> list[Rollout]:
    """Cut the concatenated arrays back into rollouts."""
    rollouts, start = [], 0
    for header in headers:
        fields = dict(header)
        end = start + fields.pop("length")
        spans = tuple(VersionSpan(**span) for span in fields.pop("versions"))
        cut = slice(start, end)
        rollouts.append(
            Rollout(
                token_ids=arrays["tokens"][cut],
                log_probs=arrays["log_probs"][cut],
                loss_mask=arrays["loss_mask"][cut],
                versions=spans,
                **fields,
            )
        )
        start = end
    return rollouts
