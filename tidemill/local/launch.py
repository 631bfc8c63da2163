"""`tidemill run`: the pipeline of one run on this machine, watched from start to end.

    this process ─► runner (own session, output to log.txt) ─► a process for every step ─► Ray, engines, S3 server
         ▲                                                             │
         └──────────── events.jsonl, failure.json, summary.json ◄──────┘

Whatever happens, also on Ctrl-C, no process of the run is left when this one ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tidemill.cluster.processes import adopt_orphans, collect_orphans, end_descendants
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.errors import DataError, RunError
from tidemill.local.interrupt import interruptible, undisturbed
from tidemill.local.outcome import elsewhere, keep_ray_logs, program, report, say, say_interrupted, say_started
from tidemill.local.run_folder import begin, exclusive, forget, fresh, holder
from tidemill.models.locate import pin_model
from tidemill.observe.console import show_events
from tidemill.observe.events import past_events
from tidemill.steps.lock import label
from tidemill.steps.preflight import check_restart
from tidemill.steps.settings_file import FILE
from tidemill.steps.steps import teardown
from tidemill.store.inputs import upload_prompts
from tidemill.store.seaweedfs import find_server
from tidemill.store.server import store_folder
from tidemill.tracking.mlflow_runs import end_killed_run

RUNNER, PIPELINE = "tidemill_pipelines.local", "post_training"
GRACE_S = 10.0
INTERRUPTED = 130


def start(config: RunConfig, console: Console) -> int:
    """A new run of these settings; returns the exit status of the command."""
    with exclusive(config.output, config.name) as lock:
        named = fresh(pin_model(config))  # what the alias names now is what the run goes on with
        if named.cluster.provider == "kuberay":
            named = upload_prompts(named)  # pods see no file of this machine
        label(lock, holder(named.name))
        begin(named)
        return launch(named, lock, console)


def go_on(config: RunConfig, console: Console) -> int:
    """On with an earlier run; returns the exit status of the command.

    Raises:
        ConfigError: its checkpoints were made with other settings, or are not to be used.
    """
    with exclusive(config.output, config.name) as lock:
        check_restart(pin_model(config))  # before anything is started
        forget(config)
        return launch(config, lock, console)


def launch(config: RunConfig, lock: int, console: Console) -> int:
    """Run the pipeline and show how it goes; returns the exit status of the command."""
    with scratch_folder() as scratch:
        settings = proposed(config, scratch)
        adopt_orphans()
        say_started(config, console)
        with interruptible():
            return supervise(config, settings, scratch, lock, console)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for all processes of the run, with a short name, because sockets are made in it."""
    with TemporaryDirectory(prefix="tidemill-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def proposed(config: RunConfig, scratch: Path) -> Path:
    """A file of the settings for the runner; what a run that goes on had before stays until `validate` accepts them.

    Raises:
        RunError: it cannot be written.
    """
    settings = scratch / FILE
    try:
        settings.write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write to {scratch}: {error}. TMPDIR names another folder") from error
    return settings


def start_runner(config: RunConfig, settings: Path, scratch: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the KFP local runner on the pipeline, apart from our terminal's signals."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": str(scratch),
    }
    root = str(config.folder / "kfp")
    with (config.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", RUNNER, PIPELINE, root, f"config={settings}", f"run_name={config.name}"],
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
    resume = f"{program()} run --resume {config.name}{elsewhere(config)}"
    try:
        events = config.folder / "events.jsonl"
        earlier = sum(1 for _ in past_events(events))  # of a run that goes on
        runner = start_runner(config, settings, scratch, lock)
        label(lock, holder(config.name, runner.pid))  # it leads a session, and so a group
        show_events(events, earlier, End(runner, config.folder), console)
        status = runner.returncode
    except KeyboardInterrupt:
        status = INTERRUPTED
        say("stopping the run ...", console)
    finally:
        with undisturbed():
            clean_up(config)
            if status in (None, INTERRUPTED):  # None where the screen was lost, and with it what else there was to say
                end_killed_run(config)
    if status == INTERRUPTED:
        say_interrupted(resume, console)
        return INTERRUPTED
    code = report(config, status, resume, console)
    if status != 0:
        keep_ray_logs(scratch, config.folder, console)
    return code


class End(threading.Event):
    """Is set once there is nothing more to wait for; to look at it is to look after the processes."""

    def __init__(self, runner: subprocess.Popen[bytes], folder: Path) -> None:
        super().__init__()
        self.runner, self.folder = runner, folder

    def is_set(self) -> bool:
        """Whether the runner has ended or a step has failed for good."""
        collect_orphans(self.runner.pid)
        return self.runner.poll() is not None or self.failed()

    def failed(self) -> bool:
        """Whether a failure is recorded that no other try can mend; the report tells of a broken record."""
        try:
            failure = Failure.read(self.folder)
        except (DataError, OSError):
            return False
        return failure is not None and not failure.retryable

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
