"""Runs a pipeline through the KFP local runner: `python -m tidemill_pipelines.local PIPELINE ROOT NAME=VALUE ...`."""

import shlex
import sys
import warnings

from kfp import local
from tidemill_pipelines.catalogue import PIPELINES
from tidemill_pipelines.parameters import pairs, typed


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
    # KFP writes it into a shell script as it is, and a path may have spaces.
    sys.executable = shlex.quote(sys.executable)
    # What is said there of images and pods is for the cluster, and here it is known to have no effect.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")
    warnings.filterwarnings("ignore", message="Task '.*': settings .* have no effect")
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    PIPELINES[pipeline](**typed(pipeline, pairs(given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
