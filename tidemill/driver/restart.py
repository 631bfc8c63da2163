"""What a restart needs to know besides the tensors of a checkpoint."""

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
    "trainer": {"ppo_mini_batch_size"},  # with it the groups of a version, by which the ledger is read
}
"""A checkpoint fits only the same ones."""
MAY_CHANGE = re.compile(r"rewards\.\d+\.timeout_s")
"""What stands among them and changes nothing of what is learned."""


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
            ConfigError: naming the first setting that differs.
        """
        check_identity(config, self.identity)


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that make a checkpoint fit."""
    return config.model_dump(mode="json", include=dict(IDENTITY))


def check_identity(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than those of a checkpoint; one that it does not name is not judged.

    Raises:
        ConfigError: naming the first setting that differs.
    """
    for section, value in identity(config).items():
        for key, now, before in differences(value, saved.get(section, value), section):
            if not MAY_CHANGE.fullmatch(key):
                allowed = f"{in_yaml(before)}, with which {config.name} was begun"
                fix = "Its checkpoints depend on it: leave it as it was, or start a new run."
                raise ConfigError(key, now, allowed, fix)


def differences(now: Any, before: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """The innermost values that differ, as (dotted key, value now, value before)."""
    if isinstance(now, Mapping) and isinstance(before, Mapping) and now.keys() == before.keys():
        for name, value in now.items():
            yield from differences(value, before[name], f"{key}.{name}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for place, value in enumerate(now):
            yield from differences(value, before[place], f"{key}.{place}")
    elif now != before:
        yield key, now, before


def check_fit(config: RunConfig, checkpoints: Checkpoints) -> None:
    """Refuse to go on with a run that has checkpoints, where the settings say so or do not fit; reads no tensor.

    Raises:
        ConfigError: there are some and `checkpoint.resume` is `never`, or they were made with other settings.
    """
    if config.checkpoint.resume == "never" and checkpoints.versions():
        fix = "Take another name, or let it resume."
        raise ConfigError("checkpoint.resume", "never", f"auto, because {config.name} has checkpoints", fix)
    found = checkpoints.newest_valid(tensors=False)
    if found is not None:
        check_identity(config, found[1]["identity"])


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
