"""Runs a pipeline through the KFP local runner: `python -m tidemill_pipelines.local PIPELINE ROOT NAME=VALUE ...`."""

import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence

from kfp import local
from tidemill_pipelines.catalogue import PIPELINES, checked, pairs, pipeline_of

USAGE = "usage: python -m tidemill_pipelines.local PIPELINE FOLDER NAME=VALUE ..., where PIPELINE is one of"
GRACE_S = 10.0
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(pipeline: str, root: str, *given: str) -> None:
    """Run every step in its own process, in this Python environment.

    Args:
        pipeline: its name, such as `post_training`.
        root: folder for the inputs and outputs of the steps.
        given: its parameters; `config` may be the path of a run file.

    Raises:
        RuntimeError: a step failed.
        ValueError: a parameter is wrong.
    """
    # The pipeline is built first: once the local runner is set, KFP would run its tasks while building it.
    built, values = pipeline_of(pipeline), checked(pipeline, pairs(given))
    # KFP writes the path into a shell script without quotes.
    sys.executable = shlex.quote(sys.executable)
    # Images and pod settings are for the cluster; KFP warns that they have no effect here.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")
    warnings.filterwarnings("ignore", message="Task '.*': settings .* have no effect")
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    built(**values)


def command(words: Sequence[str]) -> int:
    """Run a command line; returns the exit status."""
    if len(words) < 2 or words[0] not in PIPELINES:
        sys.stderr.write(f"{USAGE} {', '.join(PIPELINES)}\n")
        return MISUSED
    try:
        given = checked(words[0], pairs(words[2:]))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return MISUSED
    os.environ["PYTHONSAFEPATH"] = "1"  # a queue.py of the user must not stand for Python's own in the steps
    try:
        main(*words)
    except RuntimeError as error:  # KFP raises it for a failed step, after printing the output of the step
        sys.stderr.write(f"the pipeline failed: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        interrupted(given)
        return INTERRUPTED
    return 0


def interrupted(given: Mapping[str, str]) -> None:
    """Clean up what KFP's runner leaves: the processes of the current step, and what `teardown` releases."""
    from tidemill.cluster.processes import adopt_orphans, end_descendants
    from tidemill.steps.request import Request
    from tidemill.steps.teardown import teardown

    adopt_orphans()
    end_descendants(GRACE_S)
    names = ("config", "overrides", "run_name", "variants")
    config, overrides, run_name, variants = (given.get(name, "") for name in names)
    teardown(Request(config, overrides, run_name), variants)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
