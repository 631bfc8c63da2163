"""What a run on this machine stands on: its Ray, the embedded S3 server, and memory that outlives a process."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError
from tidemill.store.server import open_store, start_server, stop_server, store_folder

PROBE_TIMEOUT_S = 10.0
AUTH_MODE = "RAY_AUTH_MODE"
OBJECT_STORE_BYTES = 512 * 2**20  # groups are small; weights travel beside Ray


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """Services of a run on this machine, besides Ray, which ends with the process that trains."""

    config: RunConfig

    def provision(self) -> str:
        """Start the embedded store if it is used, and reach the store; returns its endpoint. May be called again.

        Raises:
            StoreError: the store does not start or cannot be reached.
        """
        if self.config.store.endpoint == "embedded":
            start_server(store_folder(self.config.output))
        with open_store(self.config.store, self.config.output) as store:
            return store.endpoint

    def teardown(self) -> None:
        """Stop the embedded store and free the memory of weights that a killed process left. May be called again."""
        if self.config.store.endpoint == "embedded":
            stop_server(store_folder(self.config.output))
        folder = weights_folder(self.config)
        if folder.exists():
            shutil.rmtree(folder)


def weights_folder(config: RunConfig) -> Path:
    """Where the weights of a new version pass to the engines: in memory, or on disk where there is no /dev/shm.

    Runs below different output folders may have the same name and must not meet there.
    """
    memory, digest = Path("/dev/shm"), hashlib.sha256(str(config.output.resolve()).encode()).hexdigest()
    return memory / f"tidemill-{config.name}-{digest[:8]}" if memory.is_dir() else config.folder / "weights"


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Ray for the time of the body: started here for `local`, else joined at RAY_ADDRESS, which Ray sets for its jobs.

    Who listens to SIGTERM goes on listening.

    Raises:
        ConfigError: no RAY_ADDRESS to join.
        RunError: Ray does not start, or nobody answers at RAY_ADDRESS.
    """
    import ray  # inside, for the steps of a pipeline whose image is without it

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What an actor leaves behind that is killed, such as the core of a vLLM engine, must not keep its GPU.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with own_sigterm():
            if config.cluster.provider == "local":
                start_ray(config)
            else:
                join_ray(config.cluster.provider)
        yield
    finally:
        ray.shutdown()


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM that this process has, if any: Ray puts one in its place that exits at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (None, signal.SIG_DFL, signal.getsignal(signal.SIGTERM)):  # None: not set by Python
            signal.signal(signal.SIGTERM, before)


def cluster_resources() -> dict[str, float]:
    """What the Ray cluster that we are connected to has: `CPU`, `GPU`, `memory`, ..."""
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return resources


def start_ray(config: RunConfig) -> None:
    """Start a Ray of our own; it ends with this process."""
    import ray

    try:
        ray.init(
            address="local",
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            namespace=config.name,
            logging_level=logging.WARNING,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"Ray does not start on this machine: {error}") from error


def join_ray(provider: str) -> None:
    """Join the cluster at RAY_ADDRESS."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        fix = "Set RAY_ADDRESS, or choose local."
        raise ConfigError("cluster.provider", provider, f"{provider} with RAY_ADDRESS set", fix)
    probe(address)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise not_joined(address, error) from error


def not_joined(address: str, error: Exception) -> RunError:
    """Why there is no way into the cluster at an address; Ray itself does not tell that a token was missing."""
    fix = "" if AUTH_MODE in os.environ else f". If it asks for a token, set {AUTH_MODE}=token"
    return RunError(f"no Ray answers at RAY_ADDRESS = {address}: {error}{fix}")


def probe(address: str) -> None:
    """Knock at `HOST:PORT`: Ray itself would try for many minutes. Other forms, such as `ray://`, are left to Ray.

    Raises:
        RunError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"no Ray answers at RAY_ADDRESS = {address}: {error}") from error
