"""Runs the pipeline through the KFP local runner: `python -m tidemill_pipelines.local CONFIG.yaml NAME ROOT`."""

import shlex
import sys
import warnings
from pathlib import Path

from kfp import local
from tidemill_pipelines.post_training import post_training


def main(config: str, name: str, root: str) -> None:
    """Run every step in a process of its own, in this Python environment.

    Args:
        config: file with the run's settings.
        name: of the run.
        root: folder for the steps' inputs and outputs.

    Raises:
        RuntimeError: a step failed.
    """
    # KFP writes it into a shell script as it is, and a path may have spaces.
    sys.executable = shlex.quote(sys.executable)
    # What is said there of images and pods is for the cluster, and here it is known to have no effect.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")
    warnings.filterwarnings("ignore", message="Task '.*': settings .* have no effect")
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    post_training(config=Path(config).read_text(encoding="utf-8"), run_name=name)


if __name__ == "__main__":
    main(*sys.argv[1:])
