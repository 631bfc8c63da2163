"""Runs the pipeline through the KFP local runner: `python -m tidemill_pipelines.local CONFIG.yaml ROOT`."""

import shlex
import sys
from pathlib import Path

from kfp import local
from tidemill_pipelines.post_training import post_training


def main(config: str, root: str) -> None:
    """Run every step in a process of its own, in this Python environment.

    Args:
        config: file with the run's settings.
        root: folder for the steps' inputs and outputs.

    Raises:
        RuntimeError: a step failed.
    """
    # KFP writes it into a shell script as it is, and a path may have spaces.
    sys.executable = shlex.quote(sys.executable)
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
    post_training(config=Path(config).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
