"""Prompts: rows rendered as token ids for an engine, in a deterministic order, endless or finite.

Occurrence `uid` is position `uid % N` of epoch `uid // N`, where N is the number of rows. Each epoch has its own
permutation of the rows, drawn from (seed, epoch) alone, so that a restarted run finds the same prompt for a `uid`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tidemill.config.data import DataConfig
from tidemill.errors import ConfigError, DataError, ModelError
from tidemill.records import Int32Array, Prompt
from tidemill.rollout.sources import Fetch, Row, load_rows

KEPT_EPOCHS = 2  # the present one, and the previous one for prompts that are issued again


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that a run uses."""

    chat_template: str | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class PromptSet:
    """The prompts of one source.

    Args:
        rows: as `sources.load_rows` returns them.
        tokenizer: of the policy.
        config: names of the columns, the system prompt, the number of epochs.
        seed: of the order.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        if not rows:
            raise DataError("a prompt set needs at least one row")
        self._rows, self._tokenizer, self._config, self._seed = rows, tokenizer, config, seed
        self._rendered: dict[int, Prompt] = {}
        self._orders: dict[int, Int32Array] = {}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def total(self) -> int | None:
        """Number of occurrences, None when epochs are unlimited."""
        return None if self._config.epochs is None else self._config.epochs * len(self._rows)

    def prompt(self, uid: int) -> Prompt:
        """Occurrence `uid` of the stream.

        Raises:
            DataError: beyond the last epoch.
        """
        return replace(self.at(self.row(uid)), uid=uid)

    def row(self, uid: int) -> int:
        """The row of occurrence `uid`.

        Raises:
            DataError: beyond the last epoch.
        """
        if uid < 0 or (self.total is not None and uid >= self.total):
            raise DataError(f"prompt occurrence {uid} is outside of the stream of {self.total}")
        epoch, position = divmod(uid, len(self._rows))
        return int(self._order(epoch)[position])

    def at(self, row: int) -> Prompt:
        """The prompt of a row in the order of the data, for evaluation; its uid is the row."""
        if row not in self._rendered:
            self._rendered[row] = self._render(row)
        return self._rendered[row]

    def too_long(self, prompt: Prompt) -> bool:
        """Whether it exceeds `data.max_prompt_tokens`; such a prompt is skipped and counted, never cut."""
        return len(prompt.token_ids) > self._config.max_prompt_tokens

    def digest(self) -> str:
        """SHA-256 over the rows; a restart compares it with that of the checkpoint."""
        sha = hashlib.sha256()
        for row in self._rows:
            sha.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return sha.hexdigest()

    def canary(self) -> Int32Array:
        """`[T]` int32, 2 <= T <= `max_prompt_tokens`: the first prompt of at least two tokens, cut to the maximum.

        Raises:
            DataError: no row has two tokens.
        """
        for row in range(len(self._rows)):
            token_ids = self.at(row).token_ids[: self._config.max_prompt_tokens]
            if len(token_ids) >= 2:
                return token_ids
        raise DataError("no prompt has two tokens; the comparison of trainer and engine needs one")

    def _order(self, epoch: int) -> Int32Array:
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = epoch_order(len(self._rows), self._seed, epoch, self._config.shuffle)
        return self._orders[epoch]

    def _render(self, row: int) -> Prompt:
        columns = dict(self._rows[row])
        content = columns.pop(self._config.prompt_key)
        answer = take(columns, self._config.answer_key)
        return Prompt(
            uid=row,
            row=row,
            token_ids=encode(self._tokenizer, as_messages(content, self._config.system_prompt)),
            text=question_of(content),
            answer=as_text(answer),
            extra=columns,
        )


def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool) -> Int32Array:
    """`[rows]` int32, the row at every position of an epoch."""
    if not shuffle:
        return np.arange(rows, dtype=np.int32)
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(rows).astype(np.int32)


def as_messages(content: str | list[dict[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    """A string becomes a user message after the system prompt; a list of messages is used as it is."""
    if not isinstance(content, str):
        return content
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]


def encode(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Int32Array:
    """`[P]` int32: through the chat template, or as plain text if the tokenizer has none."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    else:
        ids = tokenizer.encode("\n\n".join(m["content"] for m in messages), add_special_tokens=True)
    return np.array(ids, dtype=np.int32)


def question_of(content: str | list[dict[str, str]]) -> str:
    """The user's question: the string, or the last user message (else the last message)."""
    if isinstance(content, str):
        return content
    questions = [message["content"] for message in content if message["role"] == "user"]
    return questions[-1] if questions else content[-1]["content"]


def take(columns: dict[str, Any], key: str) -> Any:
    """Remove a column and return it; if there is no column `a.b`, the value `b` of the mapping in column `a`."""
    if key in columns:
        return columns.pop(key)
    first, dot, rest = key.partition(".")
    inner = columns.get(first)
    return take(dict(inner), rest) if dot and isinstance(inner, dict) else None


def as_text(answer: Any) -> str | None:
    """The reference answer as a string; numbers and lists as JSON."""
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {folder}: {error}") from error
    return tokenizer


def load_prompts(config: DataConfig, tokenizer: Tokenizer, seed: int, fetch: Fetch | None = None) -> PromptSet:
    """The training prompts of a config. Errors as `sources.load_rows`."""
    return PromptSet(load_rows(config.train, config, fetch=fetch), tokenizer, config, seed)


def load_held_out(config: DataConfig, tokenizer: Tokenizer, seed: int, fetch: Fetch | None = None) -> PromptSet | None:
    """The held-out prompts of a config, if it names any. Errors as `sources.load_rows`."""
    if config.held_out is None:
        return None
    return PromptSet(load_rows(config.held_out, config, "data.held_out", fetch), tokenizer, config, seed)


def data_digests(train: PromptSet, held_out: PromptSet | None) -> dict[str, str | None]:
    """Digests of the rows of a run, by the setting that names their source."""
    return {"data.train": train.digest(), "data.held_out": held_out.digest() if held_out is not None else None}


def check_same_data(config: DataConfig, saved: Mapping[str, object], digests: Mapping[str, str | None]) -> None:
    """Refuse to resume with rows that differ from the checkpoint's: the ledger counts occurrences of those.

    Args:
        config: names the sources.
        saved: the digests in the checkpoint.
        digests: of the present rows.

    Raises:
        ConfigError: naming the source that has changed.
    """
    for (key, digest), source in zip(digests.items(), (config.train, config.held_out), strict=True):
        if saved.get(key) != digest:
            fix = "Restore the source, or start a new run with the changed one."
            raise ConfigError(key, source, "the same rows as when the run began", fix)
