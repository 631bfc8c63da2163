"""The commands for pipelines, and for what else makes a file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tidemill.command.need import need_kfp
from tidemill.errors import ConfigError, RunError


def compile_pipeline(arguments: argparse.Namespace) -> int:
    """The pipeline as a file, or whether a file is current; or the manifests of a run."""
    if arguments.manifests:
        return print_manifests(arguments)
    if arguments.overrides:
        fix = "The pipeline takes settings when it is run."
        raise ConfigError("override", arguments.overrides[0], "nothing without --manifests", fix)
    need_kfp()
    if not arguments.check:
        path = arguments.output or f"{arguments.pipeline}.yaml"
        compile_to(arguments.pipeline, Path(path))
        print(f"wrote {path}")
        return 0
    with TemporaryDirectory() as folder:
        fresh = Path(folder) / "pipeline.yaml"
        compile_to(arguments.pipeline, fresh)
        golden = Path(arguments.check)
        if golden.is_file() and golden.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"):
            return 0
    raise RunError(f"{arguments.check} is out of date: run `make golden`")


def print_manifests(arguments: argparse.Namespace) -> int:
    """What a run makes in a Kubernetes cluster; nothing is sent.

    Raises:
        ConfigError: --check is there too, or the file cannot be written.
    """
    from tidemill.kuberay.show import manifests
    from tidemill.run_file import load_config

    if arguments.check:
        fix = "--check compares the pipeline."
        raise ConfigError("check", arguments.check, "either --check or --manifests, not both", fix)
    text = manifests(load_config(arguments.manifests, arguments.overrides))
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", arguments.output, "a file that can be written", f"{error}.") from error
    print(f"wrote {arguments.output}")
    return 0


def compile_to(pipeline: str, path: Path) -> None:
    """Compile in a process of its own: only the pipelines know KFP."""
    command = [sys.executable, "-m", "tidemill_pipelines.compile", pipeline, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the pipeline cannot be written to {path}:\n{done.stderr.strip()}")


def submit(arguments: argparse.Namespace) -> int:
    """A run on KFP."""
    from tidemill.command.submission import submit as submit_run

    need_kfp()
    return submit_run(arguments)


def schedule(arguments: argparse.Namespace) -> int:
    """Runs on KFP, again and again."""
    from tidemill.command.submission import schedule as schedule_runs

    need_kfp()
    return schedule_runs(arguments)


def convert_verl(arguments: argparse.Namespace) -> int:
    """A run file from a verl script."""
    from tidemill.verl.convert import convert

    try:
        script = Path(arguments.script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("SCRIPT", arguments.script, "a readable shell script", f"{error}.") from error
    print(convert(script, arguments.settings, os.environ), end="")
    return 0
