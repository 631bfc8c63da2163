"""Runs a pipeline through the KFP local runner: `python -m tidemill_pipelines.local PIPELINE ROOT NAME=VALUE ...`."""

import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence

from kfp import local
from tidemill_pipelines.catalogue import PIPELINES, Value, pairs, pipeline_of, typed

USAGE = "usage: python -m tidemill_pipelines.local PIPELINE FOLDER NAME=VALUE ..., PIPELINE being"
ASKED = ("config", "overrides", "run_name", "variants")
GRACE_S = 10.0
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(pipeline: str, root: str, *given: str) -> None:
    """Run every step in a process of its own, in this Python environment.

    Args:
        pipeline: its name, such as `post_training`.
        root: folder for the steps' inputs and outputs.
        given: its parameters; `config` may be the path of a run file.

    Raises:
        RuntimeError: a step failed.
        ValueError: a parameter is wrong.
    """
    # Built before the runner is there, which would take its tasks for some to run.
    built, values = pipeline_of(pipeline), typed(pipeline, pairs(given))
    # KFP writes it into a shell script as it is, and a path may have spaces.
    sys.executable = shlex.quote(sys.executable)
    # What is said there of images and pods is for the cluster, and here it is known to have no effect.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")
    warnings.filterwarnings("ignore", message="Task '.*': settings .* have no effect")
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    built(**values)


def command(words: Sequence[str]) -> int:
    """What a person calls; returns the exit status."""
    if len(words) < 2 or words[0] not in PIPELINES:
        sys.stderr.write(f"{USAGE} {', '.join(PIPELINES)}\n")
        return MISUSED
    try:
        given = typed(words[0], pairs(words[2:]))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return MISUSED
    # Steps find reward functions of the working directory, as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    try:
        main(*words)
    except RuntimeError as error:  # what KFP raises for a step that failed, whose output stands above
        sys.stderr.write(f"the pipeline failed: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        interrupted(given)
        return INTERRUPTED
    return 0


def interrupted(given: Mapping[str, Value]) -> None:
    """End what the runner leaves alone: the step under way with all its processes, and what a teardown gives back."""
    from tidemill.cluster.processes import adopt_orphans, end_descendants
    from tidemill.steps.request import Request
    from tidemill.steps.teardown import teardown

    adopt_orphans()
    end_descendants(GRACE_S)
    config, overrides, run_name, variants = (str(given.get(name, "")) for name in ASKED)
    teardown(Request(config, overrides, run_name), variants)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
