"""The services of a run on this machine: its Ray, the embedded S3 server, and shared memory for weights."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.cluster.processes import safe_path
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError
from tidemill.store.server import open_store, start_server, stop_server, store_folder

PROBE_TIMEOUT_S = 10.0
AUTH_MODE = "RAY_AUTH_MODE"
RAY_SOCKET = "/tidemill-12345678/ray/session_2026-01-31_12-00-00_000000_1234567/sockets/plasma_store"
"""The longest path of a socket of Ray below the folder for temporary files."""
SOCKET_BYTES = 107
"""The longest path of a socket that Linux allows."""
OBJECT_STORE_BYTES = 512 * 2**20  # groups are small; weights travel beside Ray


def start_services(config: RunConfig) -> str:
    """Start the embedded store if it is used, and connect to the store; returns its endpoint. May be repeated."""
    if config.store.endpoint == "embedded":
        start_server(store_folder(config.output))
    with open_store(config.store, config.output) as store:
        return store.endpoint


def stop_services(config: RunConfig) -> None:
    """Stop the embedded store and free the shared memory that a killed process left. May be repeated."""
    if config.store.endpoint == "embedded":
        stop_server(store_folder(config.output))
    folder = weights_folder(config)
    if folder.exists():
        shutil.rmtree(folder)


def weights_folder(config: RunConfig) -> Path:
    """The folder through which engines get new weights: in shared memory, or on disk where /dev/shm does not exist.

    The name has a digest of the output folder, because runs below different folders may have the same name.
    """
    memory, digest = Path("/dev/shm"), hashlib.sha256(str(config.output.resolve()).encode()).hexdigest()
    return memory / f"tidemill-{config.name}-{digest[:8]}" if memory.is_dir() else config.folder / "weights"


def check_temporary_folder() -> None:
    """Refuse a folder for temporary files in which Ray cannot make its sockets.

    Raises:
        ConfigError: its path is too long.
    """
    folder, longest = tempfile.gettempdir(), SOCKET_BYTES - len(RAY_SOCKET)
    if len(os.fsencode(folder)) > longest:
        allowed = f"a path of at most {longest} bytes, because Ray makes sockets below it"
        raise ConfigError("TMPDIR", folder, allowed, "Set this environment variable to a shorter path, such as /tmp.")


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Ray within the body: a new one for `local`, else the one at RAY_ADDRESS, which Ray sets for its jobs.

    The SIGTERM handler of this process stays in place.

    Raises:
        ConfigError: RAY_ADDRESS is not set.
        RunError: Ray does not start, or no Ray answers at RAY_ADDRESS.
    """
    import ray  # not at module level: the image of the pipeline steps has no Ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Child processes of a killed actor, such as the core of a vLLM engine, must not keep its GPU.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with safe_path():
        try:
            with keep_sigterm_handler():
                if config.cluster.provider == "local":
                    start_ray(config)
                else:
                    join_ray(config.cluster.provider)
            yield
        finally:
            ray.shutdown()


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep the SIGTERM handler of this process, if any, which Ray replaces with one that exits at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (None, signal.SIG_DFL, signal.getsignal(signal.SIGTERM)):  # None: not set by Python
            signal.signal(signal.SIGTERM, before)


def cluster_resources() -> dict[str, float]:
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return resources


def cluster_hosts() -> set[str]:
    """Names of the hosts of the connected Ray cluster."""
    import ray

    return {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def start_ray(config: RunConfig) -> None:
    import ray

    try:
        ray.init(
            address="local",
            job_config=job_config(),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            namespace=config.name,
            logging_level=logging.WARNING,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"Ray does not start on this machine: {error}") from error


def job_config() -> Any:
    """Ray's settings of a driver whose working directory is not searched for modules by every worker.

    Ray puts that directory before Python's own modules, so that a queue.py of the user breaks the workers. It does not
    where a runtime environment sets the directory.
    """
    from ray.job_config import JobConfig

    class OwnModules(JobConfig):  # type: ignore[misc]  # Ray has no types here
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnModules()


def join_ray(provider: str) -> None:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        fix = "Set RAY_ADDRESS, or use local."
        raise ConfigError("cluster.provider", provider, f"{provider} with RAY_ADDRESS set", fix)
    probe(address)
    try:
        ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise not_joined(address, error) from error


def not_joined(address: str, error: Exception) -> RunError:
    """The error of a failed connection; Ray itself does not report a missing token."""
    fix = "" if AUTH_MODE in os.environ else f". If it asks for a token, set {AUTH_MODE}=token"
    return RunError(f"no Ray answers at RAY_ADDRESS = {address}: {error}{fix}")


def probe(address: str) -> None:
    """Connect to `HOST:PORT`, because Ray itself retries for many minutes. `ray://` addresses are not checked."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"no Ray answers at RAY_ADDRESS = {address}: {error}") from error
