"""What commands need besides what every installation has."""

from __future__ import annotations

import importlib.util
import os
import sys

from tidemill.errors import RunError


def need_kfp() -> None:
    """Say what to install where KFP is missing."""
    if importlib.util.find_spec("kfp") is None:
        raise RunError("this command needs KFP: pip install 'tidemill[pipelines]'")


def need_working_folder() -> None:
    """Find reward functions that stand in the working directory, as `python -m` does and an installed command not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def need_kubernetes() -> None:
    """Say what to install where the Kubernetes client is missing."""
    if importlib.util.find_spec("kubernetes") is None:
        raise RunError("this command needs the Kubernetes client: pip install 'tidemill[pipelines]'")
