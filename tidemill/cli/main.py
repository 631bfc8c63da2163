"""The command line `tidemill`: its commands, and what becomes of their errors.

The commands for this machine are in `local`. Those for KFP and Kubernetes are declared here; `submission` and `remote`
do their work and are imported when they run, so that help and usage errors appear at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tidemill import __version__
from tidemill.cli import local
from tidemill.cli.options import (
    Command,
    OptionalRunFile,
    Resume,
    RunFile,
    Settings,
    argument,
    flag,
    not_empty,
    option,
    require,
)
from tidemill.errors import ConfigError, EngineError, TidemillError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
EPILOG = """A run is one YAML file. Start from one in examples/; docs/configuration.md lists every key.

\b
  tidemill run examples/addition.yaml                    the whole pipeline
  tidemill run examples/addition.yaml trainer.steps=50   with another setting
  tidemill ui                                            curves and models
"""

RunName = Annotated[str, argument("RUN", "name of the run")]
Namespace = Annotated[str | None, option("NAME", "namespace of the runs  [default: that of this pod, else tidemill]")]
Variants = Annotated[
    str | None,
    option("FILE", "run a sweep: one variant per line, its settings separated by spaces", callback=not_empty),
]
Prompts = Annotated[
    str | None, option("URI", "train continually with the new files below s3://BUCKET/PREFIX/", callback=not_empty)
]
KfpEndpoint = Annotated[str | None, option("URL", "KFP's API, http(s)://HOST:PORT  [default: KF_PIPELINES_ENDPOINT]")]
KfpNamespace = Annotated[str, option("NAME", "your namespace where KFP has several users")]
Experiment = Annotated[
    str | None, option("NAME", "existing experiment  [default: tracking.experiment, created if missing]")
]
ServiceAccount = Annotated[str, option("NAME", "service account of the steps")]
StepsImage = Annotated[
    str | None, option("IMAGE", "image of the steps  [default: that of this version, without a registry]")
]
StoreEndpoint = Annotated[
    str | None, option("URL", "address of the store as seen from this machine  [default: store.endpoint]")
]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        print(f"tidemill {__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def tidemill(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="show the version and exit", callback=show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, flag("--debug", "show the traceback of an error")] = False,
) -> None:
    """Fully asynchronous reinforcement learning of language models, as a pipeline."""
    del version
    context.obj = debug
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(MISUSED)


for function in (local.run, local.check, local.train, local.evaluate, local.generate):
    app.command(cls=Command)(function)
app.command("compile", cls=Command)(local.compile_pipeline)


@app.command(cls=Command)
def submit(
    context: typer.Context,
    file: RunFile,
    overrides: Settings = [],
    resume: Resume = None,
    dry_run: Annotated[bool, flag("--dry-run", "send nothing; show parameters, uploads and manifests")] = False,
    wait: Annotated[bool, flag("--wait", "wait for the end of the run; fail if it fails")] = False,
    variants: Variants = None,
    prompts: Prompts = None,
    endpoint: KfpEndpoint = None,
    kfp_namespace: KfpNamespace = "",
    experiment: Experiment = None,
    service_account: ServiceAccount = "tidemill-pipeline",
    steps_image: StepsImage = None,
    store_endpoint: StoreEndpoint = None,
) -> int:
    """Start a run on KFP.

    The run file has cluster.provider: kuberay. Prompts in files of this machine are
    uploaded to the store of the run first; its keys must be in
    TIDEMILL_S3_ACCESS_KEY and TIDEMILL_S3_SECRET_KEY. The run is called NAME-ID
    after the KFP run. --variants starts a sweep, --prompts continual training:
    docs/kfp.md.

      tidemill submit run.yaml --endpoint http://127.0.0.1:8888
      tidemill submit run.yaml trainer.steps=500 rollout.engines=4 --wait
      tidemill submit run.yaml --variants rates.txt
      tidemill submit run.yaml --dry-run
    """
    require("kfp")
    from tidemill.cli import submission

    shared = (variants, prompts, endpoint, kfp_namespace, experiment, service_account, steps_image, store_endpoint)
    options = submission.Options(*shared, context.obj)
    return submission.submit(file, overrides, options, resume=resume, dry_run=dry_run, wait=wait)


@app.command(cls=Command)
def schedule(
    context: typer.Context,
    file: OptionalRunFile = None,
    overrides: Settings = [],
    cron: Annotated[str | None, option("TIMES", "start times as a cron expression")] = None,
    name: Annotated[str | None, option("NAME", "name of the schedule  [default: name of the run]")] = None,
    list_: Annotated[bool, flag("--list", "only list the schedules")] = False,
    delete: Annotated[
        str | None, option("NAME", "only disable this schedule, and delete it if none of its runs goes on")
    ] = None,
    wait: Annotated[bool, flag("--wait", "with --delete: wait for the end of its runs first")] = False,
    stop: Annotated[bool, flag("--stop", "with --delete: terminate its runs first")] = False,
    variants: Variants = None,
    prompts: Prompts = None,
    endpoint: KfpEndpoint = None,
    kfp_namespace: KfpNamespace = "",
    experiment: Experiment = None,
    service_account: ServiceAccount = "tidemill-pipeline",
    steps_image: StepsImage = None,
    store_endpoint: StoreEndpoint = None,
) -> int:
    """Start runs on KFP by a schedule.

    The schedule is enabled at once, starts one run at a time, and skips the times
    that it missed. Times are UTC unless the KFP server is set otherwise. Five
    fields are minute, hour, day of month, month, day of week; with six fields the
    first is the second.

      tidemill schedule run.yaml --cron "0 2 * * *" --prompts s3://tidemill/prompts/
      tidemill schedule --list
      tidemill schedule --delete nightly --wait
    """
    require("kfp")
    from tidemill.cli import submission

    shared = (variants, prompts, endpoint, kfp_namespace, experiment, service_account, steps_image, store_endpoint)
    options = submission.Options(*shared, context.obj)
    actions = {"FILE": file, "--cron": cron, "--list": list_, "--delete": delete, "--wait": wait, "--stop": stop}
    submission.check_one_action(actions)
    if delete:
        return submission.delete_schedule(options, delete, wait=wait, stop=stop)
    if file and cron:
        return submission.schedule(file, overrides, options, cron, name)
    return submission.list_schedules(options)


app.command("convert-verl", cls=Command)(local.convert_verl)


@app.command(cls=Command)
def status(run: Annotated[str, argument("RUN", "name of a run, or all")], namespace: Namespace = None) -> int:
    """Show the state of runs on Kubernetes.

    Shows phase, step, what the pods wait for, GPUs and GPU hours, and why a run
    failed. The cluster is that of KUBECONFIG, or the one that this command runs in.

      tidemill status addition-1f2e3d4c
      tidemill status all --namespace team-a
    """
    from tidemill.cli import remote

    return remote.status(remote.connect(namespace, run), run)


@app.command(cls=Command)
def logs(
    run: RunName,
    follow: Annotated[bool, flag("--follow", "keep printing new lines until the run ends", "-f")] = False,
    namespace: Namespace = None,
) -> int:
    """Show the log of a run on Kubernetes.

    The log is what the driver of the newest attempt writes.

      tidemill logs addition-1f2e3d4c --follow
    """
    from tidemill.cli import remote

    return remote.logs(remote.connect(namespace, run), run, follow=follow)


@app.command(cls=Command)
def stop(
    run: RunName,
    now: Annotated[bool, flag("--now", "delete its cluster at once")] = False,
    reason: Annotated[str, option("TEXT", "reason for the summary of the run", callback=not_empty)] = "tidemill stop",
    namespace: Namespace = None,
) -> int:
    """Stop a run on Kubernetes.

    The run ends after the current step, with a checkpoint and an exported model,
    and its pipeline continues with the evaluation. --now deletes its cluster at
    once; the newest checkpoint is kept either way.

      tidemill stop addition-1f2e3d4c --reason "reward is flat"
      tidemill stop addition-1f2e3d4c --now
    """
    from tidemill.cli import remote

    return remote.stop(remote.connect(namespace, run), run, reason=reason, now=now)


@app.command(cls=Command)
def reap(
    older_than: Annotated[int, option("MINUTES", "minutes without a sign of life from the watcher", min=1)] = 30,
    dry_run: Annotated[bool, flag("--dry-run", "only say what would be deleted")] = False,
    endpoint: Annotated[str | None, option("URL", "KFP to ask whether runs are over  [default: none is asked]")] = None,
    namespace: Namespace = None,
) -> int:
    """Delete clusters that nobody watches.

    Deletes the Ray clusters of runs whose watcher has given no sign of life for
    long, whose KFP run is over, or whose workflow is gone. A CronJob of k8s/ does
    this every two minutes.

      tidemill reap --dry-run
      tidemill reap --older-than 60 --endpoint http://ml-pipeline.kubeflow:8888
    """
    from tidemill.cli import remote

    return remote.reap_runs(remote.connect(namespace), older_than, endpoint, dry_run=dry_run)


app.command(cls=Command)(local.timeline)
app.command(cls=Command)(local.ui)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    group, context = typer.main.get_command(app), None
    try:
        with group.make_context("tidemill", list(sys.argv[1:] if argv is None else argv)) as context:
            status: int = group.invoke(context)
            return status
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:
        command = f"tidemill {context.invoked_subcommand}" if context and context.invoked_subcommand else "tidemill"
        message = error.format_message()
        print(f"tidemill: {message}{'' if message[-1] in '.?' else '.'} See `{command} --help`.", file=sys.stderr)
        return MISUSED
    except TidemillError as error:
        if context and context.obj:
            raise
        hint = " (`tidemill --debug ...` shows the output of the engine)" if isinstance(error, EngineError) else ""
        print(f"tidemill: {error}{hint}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
