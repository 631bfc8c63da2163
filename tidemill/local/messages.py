"""The messages of a run on this machine: its report, or why it failed, and the commands to run next."""

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
from tidemill.steps.provider import nearest_folder
from tidemill.tracking.mlflow_server import SERVERS

SHORT = 100  # characters of a prompt that is easy to copy
FULL_BYTES = 2**28  # free on a full disk, after a failed step removed its files


def report_end(config: RunConfig, status: int | None, resume: str, console: Console) -> int:
    """Print the report, or why the run failed; returns the exit status of the command.

    Args:
        config: of the run.
        status: exit status of the pipeline.
        resume: command that resumes the run.
        console: where to print.
    """
    log = config.folder / "log.txt"
    try:
        failure = Failure.read(config.folder)
        if status == 0 and failure is None:
            print_report(config, Summary.read(config.folder / "summary.json"), console)
            return 0
        message = reason(failure, log)
    except (DataError, OSError) as error:
        message = f"the result of the run cannot be read: {error}\n{end_of(log)}"
    console.print(Text(message, style="bold red"), Text(f"log: {shown(log)}"), sep="\n", soft_wrap=True)
    print_full_disk(config, resume, console)
    return 1


def reason(failure: Failure | None, log: Path) -> str:
    """Why the pipeline failed."""
    if failure is None:
        return f"the pipeline failed; the end of its log:\n{end_of(log)}"
    return f"{failure.step} failed: {failure.message if failure.expected else tail_of(failure.origin)}"


def end_of(log: Path) -> str:
    """The last lines of a log, or why it cannot be read."""
    try:
        return tail_of(log.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return f"there is no log: {error}"


def print_full_disk(config: RunConfig, resume: str, console: Console, *, full_bytes: int = FULL_BYTES) -> None:
    """Print that the disk below the output is full, if it is, because that causes many other errors."""
    if shutil.disk_usage(nearest_folder(config.output)).free < full_bytes:
        text = f"no space left below {shown(config.output)}: free some, then `{resume}`"
        console.print(Text(text, style="bold red"), soft_wrap=True)


def print_started(config: RunConfig, console: Console) -> None:
    print_line(f"run {config.name}: its files are in {shown(config.folder)}; Ctrl-C ends it", console)


def print_interrupted(resume: str, console: Console) -> None:
    print_line(f"interrupted; `{resume}` resumes from the newest checkpoint", console)


def print_line(line: str, console: Console) -> None:
    """Print a line unchanged: brackets are not markup, and numbers have no colour."""
    console.print(Text(line), soft_wrap=True)


def keep_ray_logs(scratch: Path, folder: Path, console: Console) -> None:
    """Copy Ray's logs of a failed run to its folder, because a killed actor writes nowhere else."""
    logs = scratch / "ray" / "session_latest" / "logs"
    if not logs.is_dir():
        return
    try:
        shutil.copytree(logs.resolve(), folder / "ray-logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    except shutil.Error as error:  # one entry a file
        files = error.args[0]
        print_line(f"{len(files)} of Ray's logs could not be copied: {files[0][2]}", console)
    except OSError as error:
        print_line(f"Ray's logs could not be copied: {error}", console)


def print_report(config: RunConfig, summary: Summary, console: Console) -> None:
    render(summary, console, generate_command(config, summary), mlflow_command(config))


def generate_command(config: RunConfig, summary: Summary) -> str:
    """The command that asks the trained model the first short held-out prompt."""
    folder = config.folder / "model"
    exported = str(shown(folder)) if folder.is_dir() else str(summary.model_uri)
    model = shlex.quote(f"models:/{summary.model_version}" if summary.model_version else exported)
    short = [sample.prompt for sample in summary.samples if len(sample.prompt) <= SHORT and sample.prompt.isprintable()]
    prompt = shlex.quote(short[0]) if short else "PROMPT"
    return f"{program()} generate {model} {prompt}{output_option(config)}{server_options(config)}"


def server_options(config: RunConfig) -> str:
    """The options for a store and an MLflow outside the folder of runs."""
    endpoint = None if config.store.endpoint == "embedded" else config.store.endpoint
    named = {"--endpoint": endpoint, "--tracking": config.tracking.uri}
    return "".join(f" {option} {shlex.quote(address)}" for option, address in named.items() if address is not None)


def mlflow_command(config: RunConfig) -> str:
    """The command that shows the run in MLflow, or the address of the server."""
    uri = config.tracking.uri
    if uri is None:
        return f"{program()} ui{output_option(config)}"
    if uri.startswith(SERVERS):
        return config.kubernetes.pages.get("mlflow", uri)
    return f"mlflow server --backend-store-uri {shlex.quote(uri)}"


def program(argument: str | None = None) -> str:
    """The shortest command that starts this program again.

    Args:
        argument: how it was started; `sys.argv[0]` by default.
    """
    called = Path(argument or sys.argv[0])
    if called.suffix == ".py":
        return f"{shown(Path(sys.executable))} -m tidemill.cli.main"
    found = shutil.which("tidemill")
    return "tidemill" if found and called.exists() and Path(found).samefile(called) else str(shown(called))


def output_option(config: RunConfig) -> str:
    """The option for the folder of runs, if it is not the default."""
    default = config.output == RunConfig.model_fields["output"].default.resolve()
    return "" if default else f" --output {shlex.quote(str(shown(config.output)))}"


def shown(path: Path) -> Path:
    """A path relative to the working directory, if it is below it."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def tail_of(text: str, lines: int = 20) -> str:
    """The last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])
