import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tidemill.config.storage import StoreConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.store import seaweedfs
from tidemill.store.object_store import ObjectStore
from tidemill.store.seaweedfs import ServerInfo, choose_ports, find_server, log_tail, ports_free
from tidemill.store.server import embedded_store, open_store, start_server, stop_server

OTHER_PROCESS = """
import sys
from pathlib import Path
from tidemill.store.server import embedded_store
with embedded_store(Path(sys.argv[1])) as info:
    print(info.pid, flush=True)
    sys.stdin.read()
"""


def connect(info: ServerInfo) -> ObjectStore:
    return ObjectStore.connect(info.endpoint, "tidemill", info.access_key, info.secret_key)


def servers_of(folder: Path) -> list[int]:
    wanted = f"-dir={folder.resolve() / 'data'}"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if wanted in (p.info["cmdline"] or [])]


def other_user(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_killed_server_comes_back_with_its_data_and_address(tmp_path: Path) -> None:
    with embedded_store(tmp_path) as first:
        connect(first).put_bytes("k", b"x" * 3_000_000)
        os.kill(first.pid, signal.SIGKILL)
        os.waitpid(first.pid, 0)
        with embedded_store(tmp_path) as second:
            assert (second.pid != first.pid, second.endpoint) == (True, first.endpoint)
            assert connect(second).get_bytes("k") == b"x" * 3_000_000
        assert find_server(tmp_path) is not None
    assert servers_of(tmp_path) == []
    assert not (tmp_path / "server.json").exists()
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{first.ports[0]}.sock"))


def test_two_processes_share_a_server_and_the_last_stops_it(tmp_path: Path) -> None:
    with other_user(tmp_path) as other:
        assert other.stdout is not None and other.stdin is not None
        pid = int(other.stdout.readline())
        with embedded_store(tmp_path) as info:
            assert info.pid == pid
            other.stdin.close()
            assert other.wait(120) == 0
            assert connect(info).list("") == ()
            assert servers_of(tmp_path) == [pid]
    assert servers_of(tmp_path) == []


def test_server_of_a_killed_process_is_adopted_and_ended(tmp_path: Path) -> None:
    with other_user(tmp_path) as other:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        other.kill()
    assert servers_of(tmp_path) == [pid]
    with embedded_store(tmp_path) as info:
        assert info.pid == pid
    assert servers_of(tmp_path) == []


def test_started_server_outlives_its_users_until_it_is_stopped(tmp_path: Path) -> None:
    info = start_server(tmp_path)
    assert start_server(tmp_path) == info
    with open_store(StoreConfig(), tmp_path.parent) as elsewhere, embedded_store(tmp_path) as used:
        assert used == info
        assert elsewhere.endpoint != info.endpoint
    assert servers_of(tmp_path) == [info.pid]
    assert stop_server(tmp_path)
    assert servers_of(tmp_path) == []
    assert not stop_server(tmp_path)
    assert not stop_server(tmp_path / "never")


def test_keys_are_random_private_and_stay(tmp_path: Path) -> None:
    keys = seaweedfs.folder_keys(tmp_path)
    assert seaweedfs.folder_keys(tmp_path) == keys
    assert (tmp_path / "s3.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    assert seaweedfs.folder_keys(tmp_path / "other") != keys


def test_a_foreign_process_under_the_recorded_pid_is_left_alone(tmp_path: Path) -> None:
    started = psutil.Process().create_time()
    info = ServerInfo("http://127.0.0.1:1", "a", "b", os.getpid(), started, choose_ports(), keep=True)
    seaweedfs.write_info(tmp_path, info)
    assert find_server(tmp_path) is None
    assert not stop_server(tmp_path)


def test_a_port_taken_since_the_choice_is_replaced(tmp_path: Path) -> None:
    folder, ports = tmp_path.resolve(), choose_ports()
    (folder / "data").mkdir()
    seaweedfs.folder_keys(folder)
    with socket.create_server(("127.0.0.1", ports[0])):
        pid = seaweedfs.spawn(folder, ports)
        info = ServerInfo("http://127.0.0.1:1", "a", "b", pid, seaweedfs.start_time(pid), ports, keep=False)
        assert not seaweedfs.wait_ready(folder, info)
        assert not ports_free(ports)
    assert "not available" in log_tail(folder)


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "filerldb2").write_text("not a folder")
    with pytest.raises(StoreError, match=r"server\.log"), embedded_store(tmp_path):
        pass
    assert servers_of(tmp_path) == []


def test_a_server_is_on_record_and_holds_no_files_of_its_parent(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with embedded_store(tmp_path) as info:
        assert json.loads((tmp_path / "server.json").read_text())["endpoint"] == info.endpoint
        assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600
        os.close(writer)
        assert os.read(reader, 1) == b""
    os.close(reader)


def test_other_endpoints_need_keys_and_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_S3_ACCESS_KEY", raising=False)
    config = StoreConfig(endpoint="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="TIDEMILL_S3_ACCESS_KEY"), open_store(config, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_configured_endpoint_is_used_with_the_keys_of_the_environment(
    server: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server[1])
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server[2])
    with open_store(StoreConfig(endpoint=server[0]), tmp_path) as store:
        store.put_bytes("k", b"v")
    assert list(tmp_path.iterdir()) == []
