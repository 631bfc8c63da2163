"""Where a run takes place, and what the steps of the pipeline ask of that place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from tidemill.cluster.local import LocalCluster
from tidemill.config.run import RunConfig
from tidemill.models.locate import Locator, fetch_model
from tidemill.observe.events import EventLog
from tidemill.observe.report import Summary
from tidemill.protocols import Evaluation
from tidemill.steps.lock import held, label
from tidemill.steps.preflight import check_cluster, check_room, count_weights
from tidemill.store.checkpoint import remove_partial_transfers
from tidemill.store.lease import Claim, leased, next_claim
from tidemill.store.server import open_store


class Provider(Protocol):
    """One of `cluster.provider`. All methods raise TidemillError."""

    def check(self) -> None:
        """Refuse a run for which the place has no room, or nothing to run it on."""
        ...

    def provision(self, log: EventLog) -> dict[str, Any]:
        """Take what the run needs; what an earlier try took is used. Returns what `train` is told, a JSON value."""
        ...

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        """Train to the end."""
        ...

    def score(self, summary: Summary) -> Evaluation | None:
        """What the exported model answers to the held-out prompts; None where it was not asked."""
        ...

    def teardown(self) -> None:
        """Give back what `provision` took; may be called again, and without it."""
        ...


@dataclass(frozen=True, slots=True)
class MachineProvider:
    """This machine, with a Ray of its own or the one at RAY_ADDRESS."""

    config: RunConfig

    def check(self) -> None:
        """See `Provider.check`."""
        check_cluster(self.config)
        check_room(self.config, weights=0)

    def provision(self, log: EventLog) -> dict[str, Any]:
        """Start the embedded store and make the model ready."""
        del log
        endpoint = LocalCluster(self.config).provision()
        model = fetch_model(self.config)
        check_room(self.config, count_weights(model.path))
        return {"store": endpoint, "model": str(model.path), "source": model.source}

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        """Train in this process, which writes to the same log itself."""
        del provisioned, log
        return train_here(self.config)

    def score(self, summary: Summary) -> Evaluation | None:
        """Ask the exported model in an engine of its own."""
        return None if summary.model_uri is None else score(self.config, summary.model_uri)

    def teardown(self) -> None:
        """See `Provider.teardown`."""
        LocalCluster(self.config).teardown()
        remove_partial_transfers(self.config)


def train_here(config: RunConfig, *, score_last: bool = False) -> Summary:
    """Train in this process, as the only one of this machine; see `run.train`."""
    from tidemill.driver.run import train

    with sole_training(config), claimed(config) as claim:
        return train(config, claim=claim, score_last=score_last)


@contextmanager
def claimed(config: RunConfig) -> Iterator[Claim | None]:
    """Hold the run's lease in a store that other machines reach too: the training that began last goes on."""
    if config.store.endpoint == "embedded":  # it lies below a folder that is locked
        yield None
        return
    with open_store(config.store, config.output) as store:
        claim = next_claim(store, config.name)
        with leased(store, config.name, claim):
            yield claim


@contextmanager
def sole_training(config: RunConfig) -> Iterator[None]:
    """One training of a run at a time, also where all that had started the one before was killed, and it was not.

    Raises:
        RunError: another process trains the run.
    """

    def refusal(holder: str) -> str:
        return f"process {holder} still trains {config.name}: wait for it, or end it, then resume the run"

    with held(config.folder / "train.lock", refusal) as lock:
        label(lock, str(os.getpid()))
        yield


def provider_of(config: RunConfig) -> Provider:
    """The place of a run."""
    if config.cluster.provider == "kuberay":
        from tidemill.kuberay.provider import KubernetesProvider

        return KubernetesProvider(config)
    return MachineProvider(config)


def score(config: RunConfig, model: str) -> Evaluation:
    """Greedy answers of a model, wherever it lies, to the run's held-out prompts, from an engine in this process."""
    from tidemill.rollout.scoring import score_model

    with TemporaryDirectory(prefix="tidemill-model-") as folder:
        return score_model(config, Locator.of(config).fetch_model(model, Path(folder)).path)
