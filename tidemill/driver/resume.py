"""The state of a restart besides the tensors of a checkpoint, and the settings on which a checkpoint depends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, in_yaml
from tidemill.protocols import Answer, Evaluation
from tidemill.store.checkpoint import Checkpoints
from tidemill.train.trainer import Position

IDENTITY: Mapping[str, Any] = {
    **dict.fromkeys(("model", "seed", "data", "rewards", "algorithm", "asynchrony"), True),
    "trainer": {"ppo_mini_batch_size"},  # gives the groups of a version, on which the ledger depends
}
"""Settings that must equal those of the checkpoint."""
MAY_CHANGE = re.compile(r"rewards\.\d+\.timeout_s")
"""Exceptions, which do not affect the training."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The state of a checkpoint.

    Attributes:
        position: progress of the run.
        ledger: state of the prompt ledger.
        mlflow_run_id: the MLflow run to continue; None if MLflow never answered.
        identity: the settings of `IDENTITY`.
        held_out_before: evaluation of the initial policy, for the report.
    """

    position: Position
    ledger: Mapping[str, object]
    mlflow_run_id: str | None
    identity: Mapping[str, Any]
    held_out_before: Evaluation | None

    def to_state(self) -> dict[str, object]:
        """The state as JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Restart:
        """Read the result of `to_state`."""
        before = state["held_out_before"]
        if before is not None:
            before = Evaluation(**{**before, "answers": tuple(Answer(**answer) for answer in before["answers"])})
        position = Position(**state["position"])
        return cls(position, state["ledger"], state["mlflow_run_id"], state["identity"], before)


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings of `IDENTITY`, as JSON values."""
    return config.model_dump(mode="json", include=dict(IDENTITY))


def check_identity(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of a checkpoint; a setting that the checkpoint does not name may differ.

    Raises:
        ConfigError: naming the first setting that differs.
    """
    for section, value in identity(config).items():
        for key, now, before in differences(value, saved.get(section, value), section):
            if not MAY_CHANGE.fullmatch(key):
                allowed = f"{in_yaml(before)}, the value at the start of {config.name}"
                fix = "Its checkpoints depend on this setting: keep the value, or start a new run."
                raise ConfigError(key, now, allowed, fix)


def differences(now: Any, before: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """The innermost values that differ: (dotted key, value now, value before)."""
    if isinstance(now, Mapping) and isinstance(before, Mapping) and now.keys() == before.keys():
        for name, value in now.items():
            yield from differences(value, before[name], f"{key}.{name}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for place, value in enumerate(now):
            yield from differences(value, before[place], f"{key}.{place}")
    elif now != before:
        yield key, now, before


def check_fit(config: RunConfig, checkpoints: Checkpoints) -> None:
    """Refuse to resume a run whose checkpoints do not fit the settings; reads no tensor.

    Raises:
        ConfigError: there are checkpoints and `checkpoint.resume` is `never`, or they were made with other settings or
            after more steps.
    """
    if config.checkpoint.resume == "never" and checkpoints.versions():
        fix = "Choose another name, or allow it to resume."
        raise ConfigError("checkpoint.resume", "never", f"auto, because {config.name} has checkpoints", fix)
    found = checkpoints.newest_valid(tensors=False)
    if found is None:
        return
    check_identity(config, found[1]["identity"])
    done = int(found[1]["position"]["step"])
    if config.trainer.steps < done:
        allowed = f"at least {done}, the steps that {config.name} has trained"
        raise ConfigError("trainer.steps", config.trainer.steps, allowed, "Raise it to train further.")


def find_restart(config: RunConfig, checkpoints: Checkpoints) -> Restart | None:
    """The state of the newest intact commit of the run, or None without commits.

    Raises:
        ConfigError: it was made with other settings.
        CheckpointError: there are commits and none is intact.
    """
    found = checkpoints.newest_valid()
    if found is None:
        return None
    restart = Restart.from_state(found[1])
    check_identity(config, restart.identity)
    return restart
