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
from tidemill.rollout.sources import Fetch, Row, Rows, load_rows

REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What code of a chat template or a tokenizer raises for input that it does not expect."""
TOO_LONG = "more than data.max_prompt_tokens ="
KEPT_EPOCHS = 2  # the present one, and the previous one for prompts that are issued again


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that a run uses."""

    chat_template: str | None

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, return_special_tokens_mask: bool
    ) -> Mapping[str, list[list[int]]]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


class UnusablePromptError(DataError):
    """A prompt that is skipped and counted.

    Attributes:
        reason: `too_long` or `unrenderable`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PromptSet:
    """The prompts of one source.

    Args:
        rows: as `sources.load_rows` returns them.
        tokenizer: of the policy.
        config: names of the columns, the system prompt, the number of epochs.
        seed: of the order.
        vocab_size: rows of the model's embedding, None if unknown.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        config: DataConfig,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        if not rows:
            raise DataError("a prompt set needs at least one row")
        self._rows, self._tokenizer, self._config, self._seed = rows, tokenizer, config, seed
        self.vocab_size = vocab_size
        self._prompts: dict[int, Prompt] = {}
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
            UnusablePromptError: as `at`.
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
        """The prompt of a row in the order of the data, for evaluation; its uid is the row.

        Raises:
            UnusablePromptError: it exceeds `data.max_prompt_tokens`, or cannot be rendered as tokens of the model.
        """
        if row not in self._prompts:
            self._prompts[row] = self._prompt(row)
        prompt, limit = self._prompts[row], self._config.max_prompt_tokens
        if len(prompt.token_ids) > limit:
            tokens = len(prompt.token_ids)
            raise UnusablePromptError("too_long", f"{self.place(row)}: {tokens} tokens, {TOO_LONG} {limit}")
        return prompt

    def place(self, row: int) -> str:
        """Where a row comes from, for messages."""
        return self._rows.places[row] if isinstance(self._rows, Rows) else f"row {row + 1}"

    def token_ids(self, rows: Sequence[int]) -> list[Int32Array | UnusablePromptError]:
        """`[P]` int32 for each row, however long, or why it cannot be rendered."""
        key, system = self._config.prompt_key, self._config.system_prompt
        encoded = encode_all(self._tokenizer, [as_messages(self._rows[row][key], system) for row in rows])
        return [self._checked(row, ids) for row, ids in zip(rows, encoded, strict=True)]

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
            (ids,) = self.token_ids([row])
            if not isinstance(ids, UnusablePromptError) and len(ids[: self._config.max_prompt_tokens]) >= 2:
                return ids[: self._config.max_prompt_tokens]
        raise DataError("no prompt has two tokens; the comparison of trainer and engine needs one")

    def _order(self, epoch: int) -> Int32Array:
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = epoch_order(len(self._rows), self._seed, epoch, self._config.shuffle)
        return self._orders[epoch]

    def _prompt(self, row: int) -> Prompt:
        (ids,) = self.token_ids([row])
        if isinstance(ids, UnusablePromptError):
            raise ids
        columns = dict(self._rows[row])
        content = columns.pop(self._config.prompt_key)
        answer = as_text(take(columns, self._config.answer_key))
        return Prompt(uid=row, row=row, token_ids=ids, text=question_of(content), answer=answer, extra=columns)

    def _checked(self, row: int, ids: Int32Array | DataError) -> Int32Array | UnusablePromptError:
        if not isinstance(ids, DataError):
            largest = int(ids.max(initial=0))
            if self.vocab_size is None or largest < self.vocab_size:
                return ids
            token, rows = self._tokenizer.convert_ids_to_tokens(largest), self.vocab_size
            fix = "Use the tokenizer of the model, or resize its embedding"
            ids = DataError(
                f"the token {token!r} has the id {largest}, but the model's embedding has {rows} rows. {fix}"
            )
        return UnusablePromptError("unrenderable", f"{self.place(row)}: {ids}")


def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool) -> Int32Array:
    """`[rows]` int32, the row at every position of an epoch."""
    if not shuffle:
        return np.arange(rows, dtype=np.int32)
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(rows).astype(np.int32)


def as_messages(content: str | list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """A string becomes a user message after the system prompt; messages are used as they are, without null keys."""
    if not isinstance(content, str):
        return [{key: value for key, value in message.items() if value is not None} for message in content]
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> Int32Array:
    """`[P]` int32: through the chat template, or as plain text if the tokenizer has none.

    Raises:
        DataError: the template or the tokenizer refuses the messages.
    """
    (ids,) = encode_all(tokenizer, [messages])
    if isinstance(ids, DataError):
        raise ids
    return ids


def encode_all(tokenizer: Tokenizer, prompts: Sequence[list[dict[str, Any]]]) -> list[Int32Array | DataError]:
    """`encode` of many prompts in the threads of the tokenizer; an error takes the place of one that is refused."""
    texts = [prompt_text(tokenizer, messages) for messages in prompts]
    encoded = iter(tokenize(tokenizer, [text for text in texts if isinstance(text, str)]))
    return [next(encoded) if isinstance(text, str) else text for text in texts]


def prompt_text(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str | DataError:
    """The text of a prompt, or why there is none."""
    from jinja2 import TemplateError

    try:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = "\n\n".join(message["content"] for message in messages)
        text.encode()
    except UnicodeEncodeError as error:
        return DataError(f"the prompt has {text[error.start]!r}, half of a surrogate pair and no character; remove it")
    except (TemplateError, *REFUSALS) as error:
        why = f"the chat template refuses it: {error}" if str(error) else f"the chat template raises {error!r}"
        return DataError(f"{why}. Fix the messages, or the chat template of the model")
    return text


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> list[Int32Array | DataError]:
    """The tokens of every text, or why there are none.

    A template has written the special tokens. Without one the tokenizer adds its own, but none behind the prompt: after
    an end of sequence the model would have nothing to continue.
    """
    if not texts:
        return []
    plain = not tokenizer.chat_template
    try:
        batch = tokenizer(texts, add_special_tokens=plain, return_special_tokens_mask=True)
    except REFUSALS as error:
        if len(texts) == 1:
            return [DataError(f"the tokenizer refuses it: {error!r}")]
        return [ids for text in texts for ids in tokenize(tokenizer, [text])]
    return [
        np.array(ids[: len(mask) - mask[::-1].index(0)] if 0 in mask else ids, dtype=np.int32)
        for ids, mask in zip(batch["input_ids"], batch["special_tokens_mask"], strict=True)
    ]


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


def load_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, fetch: Fetch | None = None, vocab_size: int | None = None
) -> PromptSet:
    """The training prompts of a config. Errors as `sources.load_rows`."""
    return PromptSet(load_rows(config.train, config, fetch=fetch), tokenizer, config, seed, vocab_size)


def load_held_out(
    config: DataConfig, tokenizer: Tokenizer, seed: int, fetch: Fetch | None = None, vocab_size: int | None = None
) -> PromptSet | None:
    """The held-out prompts of a config, if it names any. Errors as `sources.load_rows`."""
    if config.held_out is None:
        return None
    rows = load_rows(config.held_out, config, "data.held_out", fetch)
    return PromptSet(rows, tokenizer, config, seed, vocab_size)


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
