from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tidemill.cluster.local import not_joined, ray_session, start_services, stop_services, weights_folder
from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.run import peak_memory
from tidemill.errors import ConfigError, RunError, StoreError
from tidemill.observe.meters import MemoryMeter
from tidemill.store.seaweedfs import find_server
from tidemill.store.server import store_folder

SESSION = """
import os, signal, sys
import psutil, ray
from tidemill.cluster.local import cluster_hosts, ray_session, start_services, stop_services
from tidemill.config.reading import load_config

config = load_config(sys.argv[1], [])
signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
try:
    with ray_session(config):
        os.kill(os.getpid(), signal.SIGTERM)
        path = ray.remote(lambda: sys.path).remote()
        print(os.getcwd() in ray.get(path, timeout=200), len(cluster_hosts()))
        print(int(ray.cluster_resources()["CPU"]) == os.cpu_count())
        left = psutil.Process().children(recursive=True)
        raise KeyError
except KeyError:
    pass
psutil.wait_procs(left, timeout=120)
print(len(left) > 3, [process for process in left if process.is_running()])
"""


def test_store_stays_up_between_provision_and_teardown_and_both_may_be_repeated(addition: RunConfig) -> None:
    try:
        endpoint = start_services(addition)
        assert start_services(addition) == endpoint
        server = find_server(store_folder(addition.output))
        assert server is not None and server.endpoint == endpoint
    finally:
        stop_services(addition)
    stop_services(addition)
    assert not psutil.pid_exists(server.pid)


def test_teardown_frees_the_memory_of_weights_that_a_killed_process_left(addition: RunConfig) -> None:
    folder = weights_folder(addition)
    folder.mkdir(parents=True)
    (folder / "version-3.safetensors").write_bytes(b"weights")
    stop_services(addition)
    assert not folder.exists()


def test_store_that_does_not_answer_is_refused(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", "b")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        start_services(parse_config(addition.to_yaml(), ["store.endpoint=http://127.0.0.1:1"]))


def test_existing_cluster_needs_its_address(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    existing = parse_config(addition.to_yaml(), ["cluster.provider=existing"])
    with pytest.raises(ConfigError, match="RAY_ADDRESS"), ray_session(existing):
        pass


@pytest.mark.slow
def test_ray_ends_with_its_session_and_keeps_the_signal_handler_and_the_modules_of_python(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/addition.yaml"
    command = [sys.executable, "-c", SESSION, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path)
    assert done.stdout.split("\n")[:4] == ["asked to end", "False 1", "True", "True []"]


def test_runs_of_one_name_below_different_folders_do_not_share_weights(addition: RunConfig, tmp_path: Path) -> None:
    other = addition.model_copy(update={"output": tmp_path / "elsewhere"})
    assert weights_folder(other) != weights_folder(addition)


def test_error_of_a_failed_connection_mentions_the_token_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert str(not_joined("h:1", ConnectionError("no"))).endswith(
        "h:1: no. If it asks for a token, set RAY_AUTH_MODE=token"
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert str(not_joined("h:1", ConnectionError("no"))).endswith("h:1: no")


@pytest.mark.parametrize(("provider", "measured"), [("local", 5), ("existing", None)])
def test_memory_of_a_ray_that_others_started_is_not_measured(
    provider: str, measured: int | None, addition: RunConfig
) -> None:
    meter = MemoryMeter()
    meter.peak_bytes = 5
    assert peak_memory(parse_config(addition.to_yaml(), [f"cluster.provider={provider}"]), meter) == measured


def test_dead_ray_address_is_refused_at_once(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    existing = addition.model_copy(update={"cluster": addition.cluster.model_copy(update={"provider": "existing"})})
    with pytest.raises(RunError, match=r"no Ray answers at RAY_ADDRESS = 127\.0\.0\.1:1"), ray_session(existing):
        pass
