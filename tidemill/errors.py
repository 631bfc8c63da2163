"""Every error that Tidemill raises on purpose.

TidemillError
├── ConfigError      a setting or an input file is wrong; the user can fix it before anything starts
├── DataError        a prompt source cannot be read
├── ModelError       a model cannot be found, loaded or converted
├── RewardError      a reward function cannot be imported, or returns something that is not a reward
│   └── RewardTimeoutError   a reward function did not return in time
├── EngineError      a generation engine failed or did not answer in time
│   └── EngineLostError      its process died or is stuck; another engine must replace it
│       └── EngineCrashedError   it died during a request, and its machine did not
├── SyncError        an engine did not receive complete weights
│   └── ChainError   a version in the object store is damaged or incomplete
├── StoreError       the object store cannot be reached or holds a damaged object
│   ├── StoreRefusedError    it does not accept the keys
│   ├── StoreMissingError    the object does not exist
│   └── StoreGapError        a part of a sequence of objects is missing
├── CheckpointError  a checkpoint is missing, incomplete or does not fit this run
├── ClusterError     a Kubernetes cluster refuses the run, lacks what it needs, or deleted it
└── RunError         a run cannot continue: an actor died or made no progress in time

All of them can be pickled, because they cross Ray's process boundary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

PLAIN = re.compile(r"[A-Za-z_][\w.-]*")


class TidemillError(Exception):
    """Base of all errors raised on purpose; its text is one complete message for the user."""


class ConfigError(TidemillError, ValueError):
    """A setting is wrong. The message names the key, the value, what is allowed and what to do."""

    def __init__(self, key: str, value: object, allowed: str, fix: str) -> None:
        self.key, self.value, self.allowed, self.fix = key, value, allowed, fix
        super().__init__(f"{key} = {in_yaml(value)}. Allowed: {allowed}. {fix}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.allowed, self.fix)


class DataError(TidemillError, ValueError):
    """A prompt source cannot be read; the message names the file and the line."""


class ModelError(TidemillError, ValueError):
    """A model cannot be found, loaded or converted."""


class RewardError(TidemillError, ValueError):
    """A reward function cannot be imported, or returned something that is not a reward."""


class RewardTimeoutError(RewardError):
    """A reward function did not return before its deadline and was killed."""


class EngineError(TidemillError, RuntimeError):
    """A generation engine failed or did not answer before its deadline."""


class EngineLostError(EngineError):
    """An engine's process died or is stuck; its requests must go to another engine."""


class EngineCrashedError(EngineLostError):
    """An engine died during a request, while the process around it and its machine did not."""


class SyncError(TidemillError, RuntimeError):
    """An engine did not receive complete weights, or computes other log-probs with them than the trainer."""


class ChainError(SyncError):
    """A version in the object store, or one that it is based on, is damaged or incomplete."""


class StoreError(TidemillError, OSError):
    """The object store cannot be reached, refuses a request, or holds a damaged object."""


class StoreRefusedError(StoreError):
    """The object store does not accept the keys, or they lack a permission; another attempt would fail as well."""


class StoreMissingError(StoreError):
    """The object does not exist in the store."""


class StoreGapError(StoreError):
    """A part of a sequence of objects is missing, while later parts exist."""

    def __init__(self, message: str, end: int = 0) -> None:
        """Args: message: for the user; end: offset of the first byte after the gap."""
        self.end = end
        super().__init__(message)

    def __reduce__(self) -> tuple[type[StoreGapError], tuple[str, int]]:
        return type(self), (str(self), self.end)


class CheckpointError(TidemillError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the run that wants to resume from it."""


class ClusterError(TidemillError, RuntimeError):
    """A Kubernetes cluster refuses the run, lacks what it needs, or deleted it; another attempt would fail as well."""


class RunError(TidemillError, RuntimeError):
    """An attempt at a run cannot continue, and another attempt may succeed; the cause is chained or quoted."""


def in_yaml(value: object) -> str:
    """A value as in a run file, on one line; texts in quotes, so that their end is visible."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return number_in_yaml(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key_in_yaml(key)}: {in_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)


def number_in_yaml(value: float) -> str:
    """A number, with the dot that YAML needs: it reads 1e-06 as text."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def key_in_yaml(key: object) -> str:
    """A key of a mapping, in quotes only where needed."""
    return key if isinstance(key, str) and PLAIN.fullmatch(key) else in_yaml(key)


RETRYABLE = (RunError, EngineError, StoreError)


def is_retryable(error: BaseException) -> bool:
    """Whether another attempt may succeed; most errors would only occur again."""
    return isinstance(error, RETRYABLE) and not isinstance(error, StoreRefusedError)
