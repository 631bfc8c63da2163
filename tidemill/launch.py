"""`tidemill run`: the pipeline of one run on this machine, watched from start to end.

    this process ─► runner (own session, output to log.txt) ─► a process for every step ─► Ray, engines, S3 server
         ▲                                                             │
         └──────────── events.jsonl, failure.json, summary.json ◄──────┘

Whatever happens, also on Ctrl-C, no process of the run is left when this one ends.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import yaml
from rich.console import Console
from rich.text import Text

from tidemill.cluster.processes import adopt_orphans, collect_orphans, end_descendants
from tidemill.config import RunConfig
from tidemill.errors import ConfigError, RunError
from tidemill.failure import Failure
from tidemill.observe.events import follow, read_events
from tidemill.observe.progress import Progress
from tidemill.observe.report import Summary, render
from tidemill.run_file import load_config, parse_config
from tidemill.steps import teardown
from tidemill.store.checkpoint import has_checkpoints
from tidemill.store.server import store_folder
from tidemill.store.weed import find_server

RUNNER = "tidemill_pipelines.local"
GRACE_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130


def fresh(config: RunConfig) -> RunConfig:
    """The settings under the first free name `NAME-1`, `NAME-2`, ..., whose folder is made.

    A name is free when there is no folder of it and the store has no checkpoint of it, which would be resumed.
    The model is registered under the name as it was, so that the versions of several runs stand together.

    Raises:
        RunError: the folder cannot be made.
        ConfigError: the name becomes too long.
    """
    output = config.output.resolve()
    for number in count(1):
        tree = config.model_dump(mode="json") | {"name": f"{config.name}-{number}", "output": str(output)}
        tree["registry"]["model"] = config.registered_model
        named = parse_config(yaml.safe_dump(tree))
        if not named.folder.exists() and has_checkpoints(named):
            continue
        try:
            named.folder.mkdir(parents=True)
        except FileExistsError:
            if not output.is_dir():
                raise RunError(f"output = {output} is not a folder; name another one") from None
            continue
        except OSError as error:
            raise RunError(f"cannot make {named.folder}: {error}. Name another folder with output=...") from error
        return named
    raise AssertionError("count() has no end")


def earlier(name: str, output: Path, overrides: list[str]) -> RunConfig:
    """The settings that the run of this name was started with.

    Raises:
        ConfigError: there is no such run.
    """
    path = output.resolve() / name / "config.yaml"
    if not path.is_file():
        found = sorted(file.parent.name for file in output.glob("*/config.yaml"))
        allowed = f"a run below {output}: {', '.join(found) or 'there is none'}"
        raise ConfigError("resume", name, allowed, "Name one of them, or its folder with --output.")
    return load_config(path, overrides)


def launch(config: RunConfig, console: Console) -> int:
    """Run the pipeline and show how it goes; returns the exit status of the command."""
    with exclusive(config.output, config.name) as lock, scratch_folder() as scratch:
        settings = config.folder / "config.yaml"
        settings.write_text(config.to_yaml(), encoding="utf-8")
        Failure.forget(config.folder)
        (config.folder / "summary.json").unlink(missing_ok=True)
        adopt_orphans()
        console.print(
            f"run {config.name}: everything about it stands in {shown(config.folder)}; Ctrl-C ends it", soft_wrap=True
        )
        with interruptible():
            return supervise(config, settings, scratch, lock, console)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for all processes of the run, with a short name, because sockets are made in it."""
    with TemporaryDirectory(prefix="tidemill-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def exclusive(output: Path, name: str) -> Iterator[int]:
    """One run at a time below an output folder, because they share its S3 server and MLflow file.

    The lock is held by the runner too, so that a run whose launcher was killed still holds it.

    Raises:
        RunError: another run holds it.
    """
    with (output / "run.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(
                f"run {file.read().strip()} is still going on below {output}: wait for it, end it, or start this one "
                "elsewhere with output=FOLDER"
            ) from None
        file.truncate(0)
        file.write(f"{name} (process {os.getpid()})")
        file.flush()
        yield file.fileno()


def start_runner(settings: Path, scratch: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the KFP local runner on the pipeline, apart from our terminal's signals."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": str(scratch),
    }
    with (settings.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", RUNNER, str(settings), str(settings.parent / "kfp")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(lock,),
        )


def supervise(config: RunConfig, settings: Path, scratch: Path, lock: int, console: Console) -> int:
    """Start the runner, watch it to its end, clean up, and report."""
    status = None
    try:
        earlier_events = len(read_events(config.folder / "events.jsonl"))  # of a run that goes on
        runner = start_runner(settings, scratch, lock)
        watch(config, runner, console, earlier_events)
        status = runner.returncode
    except KeyboardInterrupt:
        console.print("stopping the run ...")
        status = INTERRUPTED
    finally:
        with undisturbed():
            clean_up(config)
    if status == INTERRUPTED:
        resume = f"{program()} run --resume {config.name}{elsewhere(config)}"
        console.print(f"interrupted; `{resume}` goes on from the newest checkpoint", soft_wrap=True)
        return INTERRUPTED
    if status != 0:
        keep_ray_logs(scratch, config.folder)
    return report(config, status, console)


def keep_ray_logs(scratch: Path, folder: Path) -> None:
    """Save what Ray wrote before a failure: an actor that was killed says nothing anywhere else."""
    logs = scratch / "ray" / "session_latest" / "logs"
    if logs.is_dir():
        shutil.copytree(logs.resolve(), folder / "ray-logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)


def watch(config: RunConfig, runner: subprocess.Popen[bytes], console: Console, earlier_events: int) -> None:
    """Show every event until the runner ends, or a step has failed in a way that another try cannot mend."""
    log = config.folder / "events.jsonl"
    with Progress(console) as progress:
        for number, event in enumerate(follow(log, End(runner, config.folder))):
            if number >= earlier_events:
                progress.handle(event)


class End(threading.Event):
    """Is set once there is nothing more to wait for; to look at it is to look after the processes."""

    def __init__(self, runner: subprocess.Popen[bytes], folder: Path) -> None:
        super().__init__()
        self.runner, self.folder = runner, folder

    def is_set(self) -> bool:
        """Whether the runner has ended or a step has failed for good."""
        collect_orphans(self.runner.pid)
        failure = Failure.read(self.folder)
        return self.runner.poll() is not None or (failure is not None and not failure.passing)

    def wait(self, timeout: float | None = None) -> bool:
        """Look again after so many seconds."""
        time.sleep(timeout or 0.0)
        return self.is_set()


def clean_up(config: RunConfig) -> None:
    """End every process of the run: the server last and in order, so that it leaves nothing behind either."""
    server = find_server(store_folder(config.output))
    end_descendants(GRACE_S, spare=server.pid if server else None)
    teardown(config.to_yaml())
    end_descendants(GRACE_S)


def report(config: RunConfig, status: int | None, console: Console) -> int:
    """The table of before and after, or why there is none; returns the exit status."""
    failure = Failure.read(config.folder)
    if status == 0 and failure is None:
        show(config, Summary.read(config.folder / "summary.json"), console)
        return 0
    log = config.folder / "log.txt"
    if failure is None:
        said = f"the pipeline failed; the end of its log:\n{tail_of(log.read_text(encoding='utf-8', errors='replace'))}"
    else:
        said = f"{failure.step} failed: {failure.message if failure.expected else tail_of(failure.origin)}"
    console.print(Text(said, style="bold red"), Text(f"log: {shown(log)}"), sep="\n", soft_wrap=True)
    return 1


def show(config: RunConfig, summary: Summary, console: Console) -> None:
    """The report, with the commands that go on from it."""
    render(summary, console, generate_command(config, summary), f"{program()} ui{elsewhere(config)}")


def generate_command(config: RunConfig, summary: Summary) -> str:
    """What asks the trained model its first held-out prompt."""
    model = f"models:/{summary.model_version}" if summary.model_version else str(shown(config.folder / "model"))
    prompt = summary.samples[0].prompt if summary.samples else "Compute 2 + 6. Reply with the number only."
    return f"{program()} generate {model} {shlex.quote(prompt)}{elsewhere(config)}"


def program() -> str:
    """How this program was called, in the shortest form that works again."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return f"{shown(Path(sys.executable))} -m tidemill.cli"
    found = shutil.which("tidemill")
    return "tidemill" if found and Path(found).samefile(called) else str(shown(called))


def elsewhere(config: RunConfig) -> str:
    """The option that names the folder of runs, unless it is the usual one."""
    usual = config.output == RunConfig.model_fields["output"].default.resolve()
    return "" if usual else f" --output {shlex.quote(str(shown(config.output)))}"


def shown(path: Path) -> Path:
    """A path as a person types it: relative to the working directory if it lies below."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def tail_of(text: str, lines: int = 20) -> str:
    """The last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the body a termination or a lost terminal raises KeyboardInterrupt, as Ctrl-C does.

    Only the first: a second one could end the cleaning up before it has begun, or the exit after it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        before.clear()
        for every in SIGNALS:
            signal.signal(every, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within the body signals to stop are ignored: it is what they ask for, and it is bounded in time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
