"""What a person is told at the end of a run: the report, or why there is none, and the commands that go on from it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.errors import DataError
from tidemill.observe.report import Summary, render
from tidemill.steps.preflight import nearest_folder
from tidemill.tracking.mlflow_server import SERVERS

SHORT = 100  # characters of a prompt that a person may want to copy
FULL_BYTES = 2**28  # so little is left of a disk that is full but for what a failed step gave back


def report(config: RunConfig, status: int | None, resume: str, console: Console) -> int:
    """The table of before and after, or why there is none; returns the exit status.

    Args:
        config: of the run.
        status: exit status of the pipeline.
        resume: command that goes on with the run.
        console: where to.
    """
    log = config.folder / "log.txt"
    try:
        failure = Failure.read(config.folder)
        if status == 0 and failure is None:
            show(config, Summary.read(config.folder / "summary.json"), console)
            return 0
        said = reason(failure, log)
    except (DataError, OSError) as error:
        said = f"how the run ended cannot be read: {error}\n{end_of(log)}"
    console.print(Text(said, style="bold red"), Text(f"log: {shown(log)}"), sep="\n", soft_wrap=True)
    say_full(config, resume, console)
    return 1


def reason(failure: Failure | None, log: Path) -> str:
    """Why the pipeline failed."""
    if failure is None:
        return f"the pipeline failed; the end of its log:\n{end_of(log)}"
    return f"{failure.step} failed: {failure.message if failure.expected else tail_of(failure.origin)}"


def end_of(log: Path) -> str:
    """The last lines of a log, or why there are none."""
    try:
        return tail_of(log.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return f"there is no log: {error}"


def say_full(config: RunConfig, resume: str, console: Console) -> None:
    """Name the cause behind many errors, if the disk below the output is full."""
    if shutil.disk_usage(nearest_folder(config.output)).free < FULL_BYTES:
        text = f"no space left below {shown(config.output)}: free some, then `{resume}`"
        console.print(Text(text, style="bold red"), soft_wrap=True)


def say_started(config: RunConfig, console: Console) -> None:
    """Where to find what a run leaves behind."""
    say(f"run {config.name}: everything about it stands in {shown(config.folder)}; Ctrl-C ends it", console)


def say_interrupted(resume: str, console: Console) -> None:
    """How to go on after Ctrl-C."""
    say(f"interrupted; `{resume}` goes on from the newest checkpoint", console)


def say(line: str, console: Console) -> None:
    """A line as it is: nothing in it is markup or gets a colour, neither numbers nor the brackets of a path."""
    console.print(Text(line), soft_wrap=True)


def keep_ray_logs(scratch: Path, folder: Path, console: Console) -> None:
    """Save what Ray wrote before a failure, as far as it goes: a killed actor says nothing anywhere else."""
    logs = scratch / "ray" / "session_latest" / "logs"
    if not logs.is_dir():
        return
    try:
        shutil.copytree(logs.resolve(), folder / "ray-logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    except shutil.Error as error:  # one entry a file
        files = error.args[0]
        say(f"{len(files)} of Ray's logs could not be kept: {files[0][2]}", console)
    except OSError as error:
        say(f"Ray's logs could not be kept: {error}", console)


def show(config: RunConfig, summary: Summary, console: Console) -> None:
    """The report, with the commands that go on from it."""
    render(summary, console, generate_command(config, summary), curves(config))


def generate_command(config: RunConfig, summary: Summary) -> str:
    """What asks the trained model its first held-out prompt that fits a line."""
    folder = config.folder / "model"
    exported = str(shown(folder)) if folder.is_dir() else str(summary.model_uri)
    model = shlex.quote(f"models:/{summary.model_version}" if summary.model_version else exported)
    short = [sample.prompt for sample in summary.samples if len(sample.prompt) <= SHORT and sample.prompt.isprintable()]
    prompt = shlex.quote(short[0]) if short else "PROMPT"
    return f"{program()} generate {model} {prompt}{elsewhere(config)}{servers(config)}"


def servers(config: RunConfig) -> str:
    """The options that name store and MLflow, where they do not lie in the folder of runs."""
    endpoint = None if config.store.endpoint == "embedded" else config.store.endpoint
    named = {"--endpoint": endpoint, "--tracking": config.tracking.uri}
    return "".join(f" {option} {shlex.quote(address)}" for option, address in named.items() if address is not None)


def curves(config: RunConfig) -> str:
    """The command that shows the run in MLflow, or the server's address."""
    uri = config.tracking.uri
    if uri is None:
        return f"{program()} ui{elsewhere(config)}"
    if uri.startswith(SERVERS):
        return config.kubernetes.pages.get("mlflow", uri)
    return f"mlflow server --backend-store-uri {shlex.quote(uri)}"


def program() -> str:
    """How this program was called, in the shortest form that works again."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return f"{shown(Path(sys.executable))} -m tidemill.cli.main"
    found = shutil.which("tidemill")
    return "tidemill" if found and called.exists() and Path(found).samefile(called) else str(shown(called))


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
