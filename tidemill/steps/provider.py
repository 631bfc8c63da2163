"""Where a run takes place: what the pipeline steps need from `cluster.provider`, and how this machine provides it."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import psutil
from safetensors import safe_open

from tidemill.cluster.local import check_temporary_folder, start_services, stop_services
from tidemill.cluster.processes import locked, write_owner
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError
from tidemill.models.hf_config import weight_files
from tidemill.models.locate import Locator, fetch_model
from tidemill.observe.events import EventLog, PhaseStarted
from tidemill.observe.report import Summary
from tidemill.protocols import Evaluation
from tidemill.store.checkpoint import remove_partial_transfers
from tidemill.store.lease import Claim, leased, next_claim
from tidemill.store.server import open_store

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
RAY_OBJECT_STORE = GIB // 2
PROCESS = 3 * GIB // 2  # of a process that has imported torch and vLLM, without a model
TRAINING_BYTES_PER_WEIGHT = 16  # fp32 weight, gradient and two moments of AdamW
LOADED_BYTES_PER_WEIGHT = 4  # on every rank, until it frees the shards of other ranks
CHECKPOINT_BYTES_PER_WEIGHT = 12
EXPORTED_BYTES_PER_WEIGHT = 2


class Provider(Protocol):
    """One value of `cluster.provider`. All methods raise TidemillError."""

    def check(self) -> None:
        """Refuse a run for which resources or access are missing."""
        ...

    def provision(self, log: EventLog) -> dict[str, Any]:
        """Start what the run needs, or find what an earlier try started; returns a JSON value for `train`."""
        ...

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        """Train to the end."""
        ...

    def score(self, summary: Summary) -> Evaluation | None:
        """Score the exported model on the held-out prompts; None if there is no score."""
        ...

    def teardown(self) -> None:
        """Release what `provision` started; may be repeated, and called without `provision`."""
        ...


def provider_of(config: RunConfig) -> Provider:
    """The provider of a run."""
    if config.cluster.provider == "kuberay":
        from tidemill.kuberay.provider import KubernetesProvider

        return KubernetesProvider(config)
    return LocalProvider(config)


@dataclass(frozen=True, slots=True)
class LocalProvider:
    """This machine, with its own Ray (`local`) or the one at RAY_ADDRESS (`existing`)."""

    config: RunConfig

    def check(self) -> None:
        if self.config.cluster.provider == "existing" and not os.environ.get("RAY_ADDRESS"):
            allowed = "existing with RAY_ADDRESS set"
            raise ConfigError("cluster.provider", "existing", allowed, "Set RAY_ADDRESS, or use local.")
        if self.config.cluster.provider == "local" and "RAY_TMPDIR" not in os.environ:  # `tidemill run` has set it
            check_temporary_folder()
        check_capacity(self.config, weights=0)

    def provision(self, log: EventLog) -> dict[str, Any]:
        """Start the embedded store and fetch the model."""
        log.write(
            PhaseStarted("start the S3 server" if self.config.store.endpoint == "embedded" else "reach the S3 store")
        )
        endpoint = start_services(self.config)
        log.write(PhaseStarted(f"find {self.config.model}; the first run on a machine downloads or converts it"))
        model = fetch_model(self.config)
        check_capacity(self.config, count_weights(model.path))
        return {"store": endpoint, "model": str(model.path), "source": model.source}

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        """Train in this process, which writes to the same events itself."""
        del provisioned, log
        return train_here(self.config)

    def score(self, summary: Summary) -> Evaluation | None:
        if summary.model_uri is None:
            return None
        with EventLog(self.config.folder / "events.jsonl") as log:
            log.write(PhaseStarted("load the exported model into a new engine and score it"))
        return score(self.config, summary.model_uri)

    def teardown(self) -> None:
        stop_services(self.config)
        remove_partial_transfers(self.config)


def train_here(config: RunConfig, *, score_last: bool = False) -> Summary:
    """Train in this process, as the only training of the run; see `driver.run.train`."""
    from tidemill.driver.run import train

    with training_lock(config), claimed(config) as claim:
        return train(config, claim=claim, score_last=score_last)


def score(config: RunConfig, model: str) -> Evaluation:
    """Greedy answers of any model to the held-out prompts of a run, from an engine in this process."""
    from tidemill.rollout.offline import evaluate_model

    with TemporaryDirectory(prefix="tidemill-model-") as folder:
        return asyncio.run(evaluate_model(config, Locator.of(config).fetch_model(model, Path(folder)).path))


@contextmanager
def claimed(config: RunConfig) -> Iterator[Claim | None]:
    """Hold the run's lease in a store that other machines share; the newest training continues, older ones stop."""
    if config.store.endpoint == "embedded":  # below a folder that is locked
        yield None
        return
    with open_store(config.store, config.output) as store:
        claim = next_claim(store, config.name)
        with leased(store, config.name, claim):
            yield claim


@contextmanager
def training_lock(config: RunConfig) -> Iterator[None]:
    """Allow one training process of a run, also if only the launcher of an earlier one was killed.

    Raises:
        RunError: another process trains the run.
    """

    def refusal(owner: str) -> str:
        return f"process {owner} still trains {config.name}: wait for it, or end it, then resume the run"

    with locked(config.folder / "train.lock", refusal) as lock:
        write_owner(lock, str(os.getpid()))
        yield


@dataclass(frozen=True, slots=True)
class Capacity:
    """Needed and free bytes of one kind of storage, and what to do if they do not suffice."""

    what: str
    needed: int
    free: int
    fix: str


def check_capacity(config: RunConfig, weights: int) -> None:
    """Refuse a run without enough memory or disk.

    Args:
        config: of the run.
        weights: parameters of the model; 0 checks the needs of any run.

    Raises:
        RunError: naming what is needed, what is free and what to do.
    """
    for capacity in capacities(config, weights):
        if capacity.free < capacity.needed:
            raise RunError(
                f"not enough {capacity.what}: about {capacity.needed / GIB:.1f} GiB are needed and "
                f"{capacity.free / GIB:.1f} GiB are free. {capacity.fix}"
            )


def capacities(config: RunConfig, weights: int) -> Iterator[Capacity]:
    """Low estimates of what a run takes on this machine."""
    ranks, engines, cache = config.trainer.ranks, config.rollout.engines, config.rollout.cpu_kv_cache_gib
    checkpoints = (config.checkpoint.keep + 2) * CHECKPOINT_BYTES_PER_WEIGHT * weights
    # The store holds two snapshots; memory holds the trainer's newest export, and the old and the new one of engines.
    snapshots, copies = (2, 3) if config.sync.transport == "object_store" else (0, 2)
    yield Capacity(
        f"disk below {config.output}",
        GIB + checkpoints + (3 + snapshots) * EXPORTED_BYTES_PER_WEIGHT * weights,
        shutil.disk_usage(nearest_folder(config.output)).free,
        "Free some, set another folder with output=..., or keep fewer checkpoints (checkpoint.keep).",
    )
    if config.cluster.provider != "local":
        return
    training = max(TRAINING_BYTES_PER_WEIGHT, ranks * LOADED_BYTES_PER_WEIGHT) * weights
    engine = PROCESS + cache * GIB + EXPORTED_BYTES_PER_WEIGHT * weights
    yield Capacity(
        "memory",
        ranks * PROCESS + training + engines * engine,
        psutil.virtual_memory().available,
        f"Close other programs, use a smaller model, or lower one of: rollout.engines = {engines}, "
        f"rollout.cpu_kv_cache_gib = {cache} (of each engine), trainer.ranks = {ranks}.",
    )
    if SHARED_MEMORY.is_dir():
        yield Capacity(
            f"shared memory in {SHARED_MEMORY}",
            RAY_OBJECT_STORE + copies * EXPORTED_BYTES_PER_WEIGHT * weights,
            shutil.disk_usage(SHARED_MEMORY).free,
            "In a container, start it with more, for example --shm-size=4g.",
        )


def count_weights(folder: Path) -> int:
    """Parameters of a model."""
    total = 0
    for path in weight_files(folder):
        with safe_open(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return total


def nearest_folder(path: Path) -> Path:
    """The folder itself, or its closest parent that exists."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
