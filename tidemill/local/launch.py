"""`tidemill run`: the pipeline of one run on this machine, from start to cleanup.

    this process ─► runner (own session, output to log.txt) ─► a process for every step ─► Ray, engines, S3 server
         ▲                                                             │
         └──────────── events.jsonl, failure.json, summary.json ◄──────┘

No process of the run outlives this one, also after Ctrl-C.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tidemill.cluster.local import check_temporary_folder
from tidemill.cluster.processes import (
    SAFE_PATH,
    adopt_orphans,
    collect_orphans,
    end_descendants,
    interruptible,
    signals_ignored,
    write_owner,
)
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.errors import DataError, RunError
from tidemill.local.messages import (
    keep_ray_logs,
    output_option,
    print_interrupted,
    print_line,
    print_started,
    program,
    report_end,
)
from tidemill.models.locate import pin_model
from tidemill.observe.console import showing_events
from tidemill.steps.provider import provider_of
from tidemill.steps.run_folder import CONFIG_FILE, clear_failure, new_run, output_lock, owner, prepare_folder
from tidemill.steps.validate import check_restart
from tidemill.store.inputs import upload_prompts
from tidemill.store.seaweedfs import find_server
from tidemill.store.server import store_folder
from tidemill.tracking.mlflow_runs import end_killed_run

RUNNER, PIPELINE = "tidemill_pipelines.local", "post_training"
POLL_S = 0.2
GRACE_S = 10.0
INTERRUPTED = 130


def start_run(config: RunConfig, console: Console) -> int:
    """Start a new run of these settings; returns the exit status of the command.

    Raises:
        ConfigError: the path of the folder for temporary files is too long.
    """
    check_temporary_folder()
    with output_lock(config.output, config.name) as lock:
        named = new_run(pin_model(config))  # a resumed run uses the version that the alias names now
        if named.cluster.provider == "kuberay":
            named = upload_prompts(named)  # pods cannot read files of this machine
        write_owner(lock, owner(named.name))
        prepare_folder(named)
        return run_pipeline(named, lock, console)


def resume_run(config: RunConfig, console: Console) -> int:
    """Resume a run; returns the exit status of the command.

    Raises:
        ConfigError: its checkpoints were made with other settings, or must not be used, or the path of the folder for
            temporary files is too long.
    """
    check_temporary_folder()
    with output_lock(config.output, config.name) as lock:
        check_restart(pin_model(config))  # before anything starts
        clear_failure(config)
        return run_pipeline(config, lock, console)


def run_pipeline(config: RunConfig, lock: int, console: Console) -> int:
    """Run the pipeline, show its events, clean up, and report; returns the exit status of the command."""
    resume = f"{program()} run --resume {config.name}{output_option(config)}"
    # Sockets are made in this folder, so its name is short.
    with TemporaryDirectory(prefix="tidemill-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        settings = write_proposed_settings(config, scratch)
        adopt_orphans()
        print_started(config, console)
        with interruptible():
            status = run_and_clean_up(config, settings, lock, console)
            if status == INTERRUPTED:
                print_interrupted(resume, console)
                return INTERRUPTED
            code = report_end(config, status, resume, console)
            if status != 0:
                keep_ray_logs(scratch, config.folder, console)
            return code


def write_proposed_settings(config: RunConfig, scratch: Path) -> Path:
    """Write the settings for the runner; those in the run's folder stay until `validate` accepts the new ones.

    Raises:
        RunError: the file cannot be written.
    """
    settings = scratch / CONFIG_FILE
    try:
        settings.write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write to {scratch}: {error}. Set another folder with TMPDIR") from error
    return settings


def run_and_clean_up(config: RunConfig, settings: Path, lock: int, console: Console) -> int | None:
    """Run the pipeline and end every process of it.

    Returns:
        The exit status of the runner; None if a step failed permanently, INTERRUPTED after a signal.
    """
    status = None
    try:
        status = follow_runner(config, settings, lock, console)
    except KeyboardInterrupt:
        status = INTERRUPTED
        print_line("stopping the run ...", console)
    finally:
        with signals_ignored():
            clean_up(config)
            if status in (None, INTERRUPTED):  # None also while an error is raised, such as that of a closed terminal
                end_killed_run(config)
    return status


def follow_runner(config: RunConfig, settings: Path, lock: int, console: Console) -> int | None:
    """Start the runner and show events until it ends or a step fails permanently; returns its exit status, if any."""
    with showing_events(config.folder / "events.jsonl", console) as shown:
        runner = start_runner(config, settings, lock)
        write_owner(lock, owner(config.name, runner.pid))  # the runner leads a session, and so a process group
        while not (shown.done() or has_ended(runner, config.folder)):
            time.sleep(POLL_S)
    return runner.returncode


def start_runner(config: RunConfig, settings: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the KFP local runner in a session of its own, which gets no signals of the terminal."""
    environment = (
        os.environ
        | SAFE_PATH
        | {
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(settings.parent),
            "RAY_TMPDIR": str(settings.parent),
        }
    )
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


def has_ended(runner: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether the runner has ended or a step has failed permanently; also reaps adopted processes."""
    collect_orphans(runner.pid)
    if runner.poll() is not None:
        return True
    try:
        failure = Failure.read(folder)
    except (DataError, OSError):
        return False  # `report_end` describes an unreadable record
    return failure is not None and not failure.retryable


def clean_up(config: RunConfig) -> None:
    """End every process of the run; the S3 server is stopped after the others, and in order."""
    server = find_server(store_folder(config.output))
    end_descendants(GRACE_S, spare=server.pid if server else None)
    provider_of(config).teardown()
    end_descendants(GRACE_S)
