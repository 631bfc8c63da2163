"""Asks KFP whether a run of it is over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import urllib3
from urllib3.exceptions import HTTPError

from tidemill.errors import ClusterError, RunError

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
TOKEN_PATH = "KF_PIPELINES_SA_TOKEN_PATH"
"""Environment variable by which KFP's own client finds the token of a pod too."""
RETRIES = urllib3.Retry(3, backoff_factor=0.5, status_forcelist={429, 500, 502, 503, 504}, raise_on_status=False)


class KfpRuns:
    """The runs of the KFP at an endpoint such as `http://ml-pipeline.kubeflow:8888`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=5, read=30), retries=RETRIES)

    def is_over(self, run: str) -> bool:
        """Whether a run has ended or was deleted.

        Raises:
            RunError: KFP does not answer.
            ClusterError: it refuses us.
        """
        path = os.environ.get(TOKEN_PATH)
        headers = {"Authorization": f"Bearer {Path(path).read_text(encoding='utf-8').strip()}"} if path else {}
        url = f"{self.endpoint}/apis/v2beta1/runs/{run}"
        try:
            response = self.pool.request("GET", url, headers=headers)
        except HTTPError as error:
            raise RunError(f"no KFP answers at {self.endpoint}: {error}") from error
        if response.status == 404:
            return True
        if response.status != 200:
            raise ClusterError(f"KFP at {self.endpoint} does not tell of run {run}: {response.status}")
        return json.loads(response.data).get("state") in ENDED
