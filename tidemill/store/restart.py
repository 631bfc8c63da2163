"""What a restart needs to know besides the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.config import RunConfig
from tidemill.errors import ConfigError, in_yaml
from tidemill.protocols import Answer, Evaluation
from tidemill.store.checkpoint import Checkpoints
from tidemill.train.trainer import Position

IDENTITY = ("model", "seed", "data", "rewards", "algorithm", "asynchrony")  # a checkpoint fits only the same ones


@dataclass(frozen=True, slots=True)
class Restart:
    """What a committed checkpoint says besides the tensors.

    Attributes:
        position: how far the run was.
        ledger: state of the prompt ledger.
        mlflow_run_id: the run that goes on; None if MLflow was away all the time.
        identity: the settings that must not change between attempts.
        held_out_before: the first policy's evaluation, so that the report still has it.
    """

    position: Position
    ledger: Mapping[str, object]
    mlflow_run_id: str | None
    identity: Mapping[str, Any]
    held_out_before: Evaluation | None

    def to_state(self) -> dict[str, object]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Restart:
        """From what `to_state` gave."""
        before = state["held_out_before"]
        return cls(
            Position(**state["position"]),
            state["ledger"],
            state["mlflow_run_id"],
            state["identity"],
            None
            if before is None
            else Evaluation(**{**before, "answers": tuple(Answer(**a) for a in before["answers"])}),
        )

    def check(self, config: RunConfig) -> None:
        """Refuse to go on with other settings than the run began with.

        Raises:
            ConfigError: naming the first one that differs.
        """
        for key, value, begun in differences(identity(config), self.identity):
            allowed = f"{in_yaml(begun)}, with which {config.name} was begun"
            raise ConfigError(key, value, allowed, "Take another name for another experiment.")


def differences(
    settings: Mapping[str, Any], begun: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values of every setting that is another one."""
    for name, value in settings.items():
        before = begun.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from differences(value, before, f"{prefix}{name}.")
        elif value != before:
            yield f"{prefix}{name}", value, before


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that make a checkpoint fit."""
    return config.model_dump(mode="json", include=set(IDENTITY))


def find_restart(config: RunConfig, checkpoints: Checkpoints) -> Restart | None:
    """The newest intact commit of a run of this name, if there is one.

    Raises:
        ConfigError: it was made with other settings.
        CheckpointError: there are commits and none is intact.
    """
    if checkpoints.latest() is None:
        return None
    found = checkpoints.newest_valid()
    if found is None:
        return None
    restart = Restart.from_state(found[1])
    restart.check(config)
    return restart
