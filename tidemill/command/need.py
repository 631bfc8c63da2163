"""What commands need besides what every installation has."""

from __future__ import annotations

import importlib.util

from tidemill.errors import RunError


def need_kfp() -> None:
    """Say what to install where KFP is missing."""
    if importlib.util.find_spec("kfp") is None:
        raise RunError("this command needs KFP: pip install 'tidemill[pipelines]'")


def need_kubernetes() -> None:
    """Say what to install where the Kubernetes client is missing."""
    if importlib.util.find_spec("kubernetes") is None:
        raise RunError("this command needs the Kubernetes client: pip install 'tidemill[pipelines]'")
