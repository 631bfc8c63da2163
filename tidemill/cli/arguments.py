"""The commands, their arguments and their help."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from tidemill import __version__

DESCRIPTION = "Asynchronous reinforcement learning of language models, as a pipeline."
EPILOG = """
A run is one YAML file. Start from one in examples/, and see docs/configuration.md for every key.

  tidemill run examples/addition.yaml                    the whole pipeline, on this machine
  tidemill run examples/addition.yaml trainer.steps=50   the same with another setting
  tidemill ui                                            curves and models of all runs, in the browser
"""
RUN = """
Steps: validate, provision, train, evaluate, register; teardown at the end, whatever happens. Every start is a new run
with a folder of its own, runs/NAME-1, runs/NAME-2 and so on, where config.yaml, log.txt, events.jsonl, summary.json
and the trained model stand. Ctrl-C ends everything; --resume goes on from the newest checkpoint.

  tidemill run examples/addition.yaml
  tidemill run examples/addition.yaml seed=3 trainer.learning_rate=2.0e-5 rewards.0.timeout_s=5
  tidemill run examples/addition.yaml model=/models/mine output=/data/runs
  tidemill run --resume addition-1
  tidemill run --resume addition-1 trainer.steps=50
"""
CHECK = """
What `run` looks at before it pays for anything: settings, prompts, rewards, model, store, MLflow and room on this
machine. No run is made. For a cluster, `tidemill submit FILE --dry-run` looks.

  tidemill check examples/addition.yaml
  tidemill check my.yaml trainer.steps=500 rewards.0.function=my_rewards:score
"""
TRAIN = """
Training alone: no pipeline around it, no registry. With RAY_ADDRESS set it joins that Ray, else it starts
one. The folder runs/NAME is that of `run`; a second start under the same name goes on from the newest checkpoint.

  tidemill train examples/addition.yaml name=probe trainer.steps=5
"""
EVALUATE = """
Answers the held-out prompts of a run file greedily and prints score and answers.

  tidemill evaluate examples/addition.yaml                          the model that the file names
  tidemill evaluate examples/addition.yaml model=models:/addition/1 a registered version
"""
GENERATE = """
MODEL is a local folder, s3://BUCKET/PREFIX, models:/NAME/VERSION of the registry, or a Hugging Face name. Where there
are several prompts, each stands above its answer.

  tidemill generate models:/addition/1 "Compute 2 + 6. Reply with the number only."
  tidemill generate runs/addition-1/model "Compute 2 + 6." "Compute 9 + 9." --temperature 1
"""
PIPELINES = ("post_training", "sweep", "continual")
COMPILE = """
Writes a pipeline as KFP takes it: upload the file in its UI, or `kfp pipeline create -p tidemill FILE`. Its parameter
`config` is the text of a run file; docs/kfp.md tells of the others.

  tidemill compile
  tidemill compile --pipeline sweep --output sweep.yaml

With --manifests it checks and prints what a run makes in a Kubernetes cluster, and sends nothing.

  tidemill compile --manifests run.yaml kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3
"""
SUBMIT = """
Starts a run on KFP, for a run file with cluster.provider: kuberay. Prompts that are files of this machine go to the
run's store first, so that its keys must be in TIDEMILL_S3_ACCESS_KEY and TIDEMILL_S3_SECRET_KEY. The run is called
NAME-ID after the KFP run. With --variants it is a sweep, with --prompts continual training: docs/kfp.md.

  tidemill submit run.yaml --endpoint http://127.0.0.1:8888
  tidemill submit run.yaml trainer.steps=500 kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3 --wait
  tidemill submit run.yaml --variants rates.txt
  tidemill submit run.yaml --dry-run
"""
SCHEDULE = """
Starts a run on KFP again and again: enabled at once, one at a time, and none for times that were missed. Times are UTC
unless KFP's server is set otherwise. Five fields are minute, hour, day of month, month, day of week; a sixth in front
of them is the second.

  tidemill schedule run.yaml --cron "0 2 * * *" --prompts s3://tidemill/prompts/
  tidemill schedule --list
  tidemill schedule --delete nightly
"""
CONVERT_VERL = """
Prints the run file of a verl command. Write `tidemill convert-verl` in the place of `python3 -m verl....main` in your
script and run the script, so that the shell expands the settings. Each is converted, listed as left out, or refused by
name. docs/from_verl.md has the whole table.

  tidemill convert-verl actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_files=train.parquet ... > run.yaml
  tidemill convert-verl --config .hydra/config.yaml trainer.n_gpus_per_node=4 ~trainer.logger > run.yaml
"""
STATUS = """
Where a run stands: phase, step, what its pods wait for, GPUs and GPU hours, and why it failed. The cluster is that of
KUBECONFIG, or the one that this runs in.

  tidemill status addition-1f2e3d4c
  tidemill status all --namespace team-a
"""
LOGS = """
What the driver of the newest attempt writes.

  tidemill logs addition-1f2e3d4c --follow
"""
STOP = """
The run ends after the step under way, with a checkpoint and an exported model, and its pipeline goes on to evaluate.
With --now its cluster is deleted at once; the newest checkpoint is kept either way.

  tidemill stop addition-1f2e3d4c --reason "reward is flat"
  tidemill stop addition-1f2e3d4c --now
"""
REAP = """
Deletes the Ray clusters of runs whose watcher has given no sign of life for long, whose KFP run is over, or whose
workflow is gone. A CronJob of k8s/ does so every five minutes.

  tidemill reap --dry-run
  tidemill reap --older-than 60 --endpoint http://ml-pipeline.kubeflow:8888
"""
TIMELINE = """
Draws when trainer and engines of a run were at work, from its events.jsonl; a resumed run since it was resumed. The
picture is an SVG file; a name in .json makes a trace instead, which https://ui.perfetto.dev opens.

  tidemill timeline addition-1
  tidemill timeline runs/addition-1 --last 10 --output timeline.json
"""
UI = """
Serves the MLflow pages of all runs below a folder, until Ctrl-C.

  tidemill ui
  tidemill ui --output /data/runs --port 5050
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command line; settings may stand before, between and behind its options.

    argparse takes all positional arguments from where the first ones stand, so that those further on are added here.
    """
    parser, words = build_parser(), sys.argv[1:] if argv is None else argv
    if not words:
        parser.exit(2, parser.format_help())
    arguments, rest = parser.parse_known_args(words)
    options = [word for word in rest if word.startswith("-")]
    if rest and ("overrides" not in arguments or options):
        dashed = next((word.lstrip("-") for word in options if "=" in word and "overrides" in arguments), None)
        hint = f" (a setting has no dashes: {dashed})" if dashed else ""
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    parser = argparse.ArgumentParser("tidemill", description=DESCRIPTION, epilog=EPILOG, formatter_class=Help)
    parser.add_argument("--version", action="version", version=f"tidemill {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run_commands(commands)
    model_commands(commands)
    pipeline_commands(commands)
    remote_commands(commands)
    picture_commands(commands)
    return parser


def run_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands for a run file, on this machine."""
    run = add(commands, "run", "run the whole pipeline on this machine", RUN)
    run.add_argument("file", nargs="?", help="the run, as YAML")
    settings(run)
    run.add_argument("--resume", metavar="NAME", help="go on with this run instead of starting one")
    run.add_argument("--output", metavar="FOLDER", help="folder of runs (default: runs, or what the file says)")

    check = add(commands, "check", "say whether a run can begin, without beginning it", CHECK)
    train = add(commands, "train", "train only, without the pipeline around it", TRAIN)
    evaluate = add(commands, "evaluate", "score a model on held-out prompts", EVALUATE)
    for command in (check, train, evaluate):
        command.add_argument("file", help="the run, as YAML")
        settings(command)

    convert = add(commands, "convert-verl", "make a run file from a verl command", CONVERT_VERL)
    convert.add_argument(
        "settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of verl: KEY=VALUE, +KEY=VALUE, ~KEY"
    )
    convert.add_argument("--config", metavar="FILE", help="Hydra YAML file that the settings are applied to")
    convert.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the run file; may be repeated"
    )
    # Options of Hydra, which verl's scripts give.
    convert.add_argument("--config-name", "-cn", help=argparse.SUPPRESS)
    convert.add_argument("--config-path", "-cp", help=argparse.SUPPRESS)


def model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command for a model."""
    generate = add(commands, "generate", "let a model answer", GENERATE)
    generate.add_argument("model", help="which model")
    generate.add_argument("prompts", nargs="+", type=text, metavar="PROMPT", help="what to answer")
    generate.add_argument("--system", metavar="TEXT", help="system message")
    generate.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="longest answer (default: 64)"
    )
    generate.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    generate.add_argument(
        "--output", default="runs", metavar="FOLDER", help="folder of runs with store and registry (default: runs)"
    )
    generate.add_argument(
        "--endpoint", default="embedded", metavar="URL", help="S3 server (default: the embedded one below --output)"
    )
    generate.add_argument("--tracking", metavar="URI", help="MLflow server (default: the SQLite file below --output)")


def picture_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that show what runs left on this machine."""
    timeline = add(commands, "timeline", "draw when trainer and engines of a run were at work", TIMELINE)
    timeline.add_argument("run", metavar="RUN", help="name below runs/, or folder")
    timeline.add_argument("--last", type=positive, metavar="N", help="the last N steps (default: all)")
    timeline.add_argument("--output", metavar="FILE", help=".svg or .json file (default: timeline.svg of the run)")

    ui = add(commands, "ui", "open curves and models of all runs", UI)
    ui.add_argument("--output", default="runs", metavar="FOLDER", help="folder of runs (default: runs)")
    ui.add_argument("--port", type=int, default=5000, metavar="N", help="port, 0 takes a free one (default: 5000)")


def pipeline_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands for the pipeline on KFP."""
    compile_ = add(commands, "compile", "write the pipeline for KFP, or the manifests of a run", COMPILE)
    compile_.add_argument("--pipeline", choices=PIPELINES, help=f"which (default: {PIPELINES[0]})")
    compile_.add_argument("--output", metavar="FILE", help="file (default: NAME.yaml; manifests are printed)")
    compile_.add_argument("--check", metavar="FILE", help="only say whether FILE is what would be written")
    compile_.add_argument("--manifests", metavar="FILE", help="a run for Kubernetes, as YAML: its manifests instead")
    settings(compile_)

    submit = add(commands, "submit", "start a run on KFP", SUBMIT)
    submit.add_argument("file", help="the run, as YAML")
    settings(submit)
    submit.add_argument("--resume", metavar="NAME", help="go on with this run instead of starting one")
    submit.add_argument("--dry-run", action="store_true", help="send nothing: show parameters and manifests")
    submit.add_argument("--wait", action="store_true", help="wait for the end of the run; fail if it fails")
    pipeline_options(submit)

    schedule = add(commands, "schedule", "start a run on KFP again and again", SCHEDULE)
    schedule.add_argument("file", nargs="?", help="the run, as YAML")
    settings(schedule)
    schedule.add_argument("--cron", metavar="TIMES", help="when, as cron")
    schedule.add_argument("--name", help="of the schedule (default: that of the run)")
    schedule.add_argument("--list", action="store_true", help="only list the schedules there are")
    schedule.add_argument("--delete", metavar="NAME", help="only delete this schedule")
    pipeline_options(schedule)


def remote_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands for runs on Kubernetes."""
    status = add(commands, "status", "say where runs on Kubernetes stand", STATUS)
    status.add_argument("run", metavar="RUN", help="name of a run, or all")
    logs = add(commands, "logs", "show the log of a run on Kubernetes", LOGS)
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is being written")
    stop = add(commands, "stop", "end a run on Kubernetes", STOP)
    stop.add_argument("--now", action="store_true", help="delete its cluster at once")
    stop.add_argument("--reason", type=text, default="tidemill stop", metavar="TEXT", help="what its summary says")
    for command in (logs, stop):
        command.add_argument("run", metavar="RUN", help="name of the run")
    reap = add(commands, "reap", "delete clusters that nobody looks after", REAP)
    reap.add_argument(
        "--older-than", type=positive, default=30, metavar="MINUTES", help="without a sign of life (default: 30)"
    )
    reap.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    reap.add_argument("--endpoint", metavar="URL", help="KFP to ask whether runs are over (default: none is asked)")
    for command in (status, logs, stop, reap):
        command.add_argument(
            "--namespace", metavar="NAME", help="of the runs (default: that of this pod, else tidemill)"
        )


def pipeline_options(command: argparse.ArgumentParser) -> None:
    """What is told to KFP besides the run."""
    command.add_argument(
        "--variants", type=text, metavar="FILE", help="a sweep: a variant a line, its settings apart by spaces"
    )
    command.add_argument(
        "--prompts", type=text, metavar="URI", help="continual training with the new files of s3://BUCKET/PREFIX/"
    )
    command.add_argument(
        "--endpoint", metavar="URL", help="KFP's API, http(s)://HOST:PORT (default: KF_PIPELINES_ENDPOINT)"
    )
    command.add_argument("--kfp-namespace", default="", metavar="NAME", help="yours, where KFP has several users")
    command.add_argument(
        "--experiment", metavar="NAME", help="one that exists (default: tracking.experiment, made if need be)"
    )
    command.add_argument(
        "--service-account",
        default="tidemill-pipeline",
        metavar="NAME",
        help="of the steps (default: tidemill-pipeline)",
    )
    command.add_argument(
        "--steps-image", metavar="IMAGE", help="image of the steps (default: that of this version, without a registry)"
    )
    command.add_argument(
        "--store-endpoint", metavar="URL", help="where the store is seen from here (default: store.endpoint)"
    )


def settings(command: argparse.ArgumentParser) -> None:
    """Overrides of a run file; the default keeps them out of what argparse calls required."""
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY.PATH=VALUE", help="instead of what the file says"
    )


def text(word: str) -> str:
    """An argument that says something."""
    if not word.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return word


def positive(word: str) -> int:
    """An argument that is a number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)


def temperature(word: str) -> float:
    """An argument that is a number of at least 0."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 on")
    return number


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str, more: str
) -> argparse.ArgumentParser:
    """One command, which its arguments know, for the message of a mistake."""
    description = f"{does[0].upper()}{does[1:]}."
    command = commands.add_parser(name, help=does, description=description, epilog=more, formatter_class=Help)
    command.set_defaults(parser=command)
    return command
