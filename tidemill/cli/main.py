"""The command line, `tidemill COMMAND`; `command/` holds what each does.

Heavy libraries are imported by the command that needs them, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tidemill.cli.arguments import parse
from tidemill.cli.models import evaluate, generate, ui
from tidemill.cli.need import need_kubernetes
from tidemill.cli.pipelines import compile_pipeline, convert_verl, schedule, submit
from tidemill.cli.runs import check, refuse_run_of_this_machine, run, timeline, train
from tidemill.errors import ConfigError, EngineError, TidemillError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def remote(arguments: argparse.Namespace) -> int:
    """A command for runs on Kubernetes."""
    if arguments.command != "reap":
        refuse_run_of_this_machine(arguments.run)
    need_kubernetes()
    from rich.console import Console

    from tidemill.cli import remote as commands
    from tidemill.config.kubernetes import KubernetesConfig
    from tidemill.kuberay.client import KubernetesCluster
    from tidemill.kuberay.release import own_namespace

    does = {"status": commands.status, "logs": commands.logs, "stop": commands.stop, "reap": commands.reap_runs}
    namespace = arguments.namespace or own_namespace() or KubernetesConfig().namespace
    return does[arguments.command](arguments, KubernetesCluster.connect(namespace), Console())


COMMANDS = {
    "run": run,
    "check": check,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "compile": compile_pipeline,
    "submit": submit,
    "schedule": schedule,
    "convert-verl": convert_verl,
    "status": remote,
    "logs": remote,
    "stop": remote,
    "reap": remote,
    "timeline": timeline,
    "ui": ui,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    arguments = parse(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except TidemillError as error:
        if arguments.debug:
            raise
        hint = " (`tidemill --debug ...` shows the output of the engine)" if isinstance(error, EngineError) else ""
        print(f"tidemill: {error}{hint}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
