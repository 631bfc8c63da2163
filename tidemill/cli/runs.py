"""The commands for runs on this machine."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

from tidemill.cli.need import need_kfp, need_working_folder
from tidemill.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline."""
    from rich.console import Console

    from tidemill.config.reading import load_config
    from tidemill.local.launch import go_on, start
    from tidemill.local.run_folder import earlier

    need_kfp()
    if arguments.resume:
        config = earlier(arguments.resume, Path(arguments.output or "runs"), resumed_overrides(arguments))
        return go_on(config, Console())
    if arguments.file:
        return start(load_config(arguments.file, [*arguments.overrides, *output_override(arguments)]), Console())
    raise ConfigError("file", None, "a run file, or --resume NAME", "For example: tidemill run examples/addition.yaml")


def resumed_overrides(arguments: argparse.Namespace) -> list[str]:
    """Settings behind `--resume`, where the first one stands in the place of the file.

    Raises:
        ConfigError: it is a file.
    """
    first = [] if arguments.file is None else [arguments.file]
    if first and ("=" not in first[0] or Path(first[0]).is_file()):
        fix = f"`tidemill run --resume {arguments.resume}` reads the settings that the run was started with."
        raise ConfigError("file", first[0], "a file or --resume, not both", fix)
    return [*first, *arguments.overrides]


def output_override(arguments: argparse.Namespace) -> list[str]:
    """`--output` as a setting.

    Raises:
        ConfigError: the setting is there too.
    """
    if arguments.output is None:
        return []
    if any(override.partition("=")[0] == "output" for override in arguments.overrides):
        raise ConfigError("output", arguments.output, "either --output or output=, not both", "Leave one of them out.")
    return [f"output={json.dumps(arguments.output)}"]


def check(arguments: argparse.Namespace) -> int:
    """What the first step of the pipeline checks, and nothing else.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    from tidemill.config.reading import load_config
    from tidemill.config.validation import notices
    from tidemill.steps.steps import checked

    need_working_folder()
    config = load_config(arguments.file, arguments.overrides)
    if config.cluster.provider == "kuberay":
        allowed = "local or existing: this machine is looked at, and no cluster"
        fix = f"`tidemill submit {arguments.file} --dry-run` checks a run for a cluster."
        raise ConfigError("cluster.provider", config.cluster.provider, allowed, fix)
    checked(config)
    for text in notices(config):
        print(f"{arguments.file}: {text}")
    print(f"{arguments.file}: nothing is wrong; a run may begin")
    return 0


def train(arguments: argparse.Namespace) -> int:
    """The engine alone."""
    from tidemill.config.reading import load_config

    need_working_folder()
    provider = ["cluster.provider=existing"] if os.environ.get("RAY_ADDRESS") else []
    config = load_config(arguments.file, [*provider, *arguments.overrides])
    from tidemill.local.attendance import attend
    from tidemill.models.locate import pin_model
    from tidemill.steps.provider import train_here

    return attend(pin_model(config), partial(train_here, score_last=True), debug=arguments.debug)


def refuse_run_of_this_machine(name: str) -> None:
    """Say where to look instead, if a command for Kubernetes was given a run below runs/ that is on no cluster.

    Raises:
        ConfigError: it was.
    """
    from tidemill.config.reading import load_config

    folder = Path("runs") / name
    settings = folder / "config.yaml"
    if settings.is_file() and load_config(settings).cluster.provider != "kuberay":
        here = f"{folder} is one of this machine: its steps stand in {folder / 'events.jsonl'}, its log beside them"
        raise ConfigError("RUN", name, "a run on Kubernetes", f"{here}; Ctrl-C where it was started ends it.")


def timeline(arguments: argparse.Namespace) -> int:
    """The picture of a run, or its trace."""
    from tidemill.observe.charts import timeline_svg
    from tidemill.observe.events import past_events
    from tidemill.observe.text import counted
    from tidemill.observe.timeline import last_steps, newest_attempt, overlap, trace

    folder = Path(arguments.run) if Path(arguments.run).is_dir() else Path("runs") / arguments.run
    events = folder / "events.jsonl"
    if not events.is_file():
        found = ", ".join(sorted(file.parent.name for file in Path("runs").glob("*/events.jsonl"))) or "none"
        fix = f"There is no {events}; runs/ has {found}."
        raise ConfigError("RUN", arguments.run, "a run below runs/, or its folder", fix)
    activities = last_steps(newest_attempt(past_events(events)), arguments.last)
    path = Path(arguments.output or folder / "timeline.svg")
    draw = {".svg": timeline_svg, ".json": trace}.get(path.suffix)
    if draw is None:
        raise ConfigError("--output", str(path), "a name that ends in .svg or .json", "The end chooses the format.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(activities), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", str(path), "a file that can be written", f"{error}.") from error
    steps = counted(len(activities), "step")
    print(f"wrote {path}: {steps}, engines generate during {overlap(activities):.0%} of the updates")
    return 0
