"""The commands for pipelines, and for what else makes a file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tidemill.cli.arguments import PIPELINES
from tidemill.cli.need import need_kfp
from tidemill.errors import ConfigError, RunError


def compile_pipeline(arguments: argparse.Namespace) -> int:
    """The pipeline as a file, or whether a file is current; or the manifests of a run."""
    if arguments.manifests:
        return print_manifests(arguments)
    if arguments.overrides:
        fix = "The pipeline takes settings when it is run."
        raise ConfigError("override", arguments.overrides[0], "nothing without --manifests", fix)
    need_kfp()
    name = arguments.pipeline or PIPELINES[0]
    text = compiled(name)
    if not arguments.check:
        write(arguments.output or f"{name}.yaml", text)
        return 0
    golden = Path(arguments.check)
    if golden.is_file() and golden.read_text(encoding="utf-8") == text:
        return 0
    raise RunError(f"{arguments.check} is out of date: run `make golden`")


def print_manifests(arguments: argparse.Namespace) -> int:
    """What a run makes in a Kubernetes cluster; nothing is sent.

    Raises:
        ConfigError: options for the pipeline are there too, or the file cannot be written.
    """
    from tidemill.config.reading import load_config
    from tidemill.kuberay.manifest import manifests

    for option, value in (("--check", arguments.check), ("--pipeline", arguments.pipeline)):
        if value is not None:
            raise ConfigError(option, value, "nothing with --manifests", "Manifests are those of one run.")
    text = manifests(load_config(arguments.manifests, arguments.overrides))
    if arguments.output is None:
        print(text, end="")
    else:
        write(arguments.output, text)
    return 0


def write(path: str, text: str) -> None:
    """A file, and the word that it is there.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", path, "a file that can be written", f"{error}.") from error
    print(f"wrote {path}")


def compiled(pipeline: str) -> str:
    """The YAML of a pipeline, made in a process of its own: only the pipelines know KFP."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        command = [sys.executable, "-m", "tidemill_pipelines.compile", pipeline, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"the pipeline {pipeline} cannot be compiled:\n{done.stderr.strip()}")
        return path.read_text(encoding="utf-8")


def submit(arguments: argparse.Namespace) -> int:
    """A run on KFP."""
    from tidemill.cli.submission import submit as submit_run

    need_kfp()
    return submit_run(arguments)


def schedule(arguments: argparse.Namespace) -> int:
    """Runs on KFP, again and again."""
    from tidemill.cli.submission import schedule as schedule_runs

    need_kfp()
    return schedule_runs(arguments)


def convert_verl(arguments: argparse.Namespace) -> int:
    """A run file from a verl command."""
    from tidemill.verl.convert import convert

    chosen = {"--config-name": arguments.config_name, "--config-path": arguments.config_path}
    options = [f"{option}={value}" for option, value in chosen.items() if value is not None]
    config = None if arguments.config is None else Path(arguments.config)
    print(convert([*options, *arguments.settings], arguments.set, os.environ, config), end="")
    return 0
