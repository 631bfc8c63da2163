"""Every error that Tidemill raises on purpose.

TidemillError
├── ConfigError      a setting or an input file is wrong; the user can fix it before anything starts
├── DataError        a prompt source cannot be read
├── ModelError       a model cannot be found, loaded or converted
├── RewardError      a reward function cannot be imported or breaks its contract
│   └── RewardTimeoutError   a reward function did not return in time
├── EngineError      a generation engine failed or did not answer in time
│   └── EngineLostError      its process died or is stuck: another engine has to take its place
│       └── EngineCrashedError   it died of itself under a request, not with its machine
├── SyncError        weights did not arrive whole at an engine
│   └── ChainError   what the object store has of a version is damaged or incomplete
├── StoreError       the object store cannot be reached or holds something broken
│   ├── StoreRefusedError    it does not accept our keys
│   ├── StoreMissingError    it has no such object
│   └── StoreGapError        a part of what was written one after the other is missing
├── CheckpointError  a checkpoint is missing, incomplete or does not fit this run
├── ClusterError     a Kubernetes cluster refuses the run, lacks what it needs, or took it away
└── RunError         a run cannot go on: an actor died or made no progress in time

All of them survive pickling, because they cross Ray's process boundary.
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
        super().__init__(f"{key} = {in_yaml(value)}: allowed is {allowed}. {fix}")

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
    """An engine's process died or is stuck; what it was asked for has to be asked of another engine."""


class EngineCrashedError(EngineLostError):
    """An engine died under a request, while the process around it and its machine live on."""


class SyncError(TidemillError, RuntimeError):
    """New weights did not arrive whole at an engine, or the engine computes something else with them."""


class ChainError(SyncError):
    """What the object store has of a version, or of those it builds upon, is damaged or incomplete."""


class StoreError(TidemillError, OSError):
    """The object store cannot be reached, refuses us, or holds something broken."""


class StoreRefusedError(StoreError):
    """The object store does not accept our keys, or they may not do what we ask; another try would end the same."""


class StoreMissingError(StoreError):
    """The object store answers, and does not have the object."""


class StoreGapError(StoreError):
    """A part of what was written one after the other is missing, and what comes after it is there."""

    def __init__(self, message: str, end: int = 0) -> None:
        """Args: message: for the user; end: offset of the first byte behind the gap."""
        self.end = end
        super().__init__(message)

    def __reduce__(self) -> tuple[type[StoreGapError], tuple[str, int]]:
        return type(self), (str(self), self.end)


class CheckpointError(TidemillError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the run that wants to resume from it."""


class ClusterError(TidemillError, RuntimeError):
    """A Kubernetes cluster refuses the run, lacks what it needs, or took it away; another try would end the same."""


class RunError(TidemillError, RuntimeError):
    """A run cannot go on; the cause is chained or quoted in the message."""


def in_yaml(value: object) -> str:
    """A value as it would stand in a run file, in one line; texts in quotes, so that one sees where they end."""
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
    """A number with the dot without which YAML takes 1e-06 for a text."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def key_in_yaml(key: object) -> str:
    """A key of a mapping, with quotes only where it needs some."""
    return key if isinstance(key, str) and PLAIN.fullmatch(key) else in_yaml(key)


RETRYABLE = (RunError, EngineError, StoreError)


def is_retryable(error: BaseException) -> bool:
    """Whether another try may succeed; most errors would only come again."""
    return isinstance(error, RETRYABLE) and not isinstance(error, StoreRefusedError)
