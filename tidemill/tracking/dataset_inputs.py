"""The prompts of a run as MLflow's datasets, by which its runs can be told apart and found."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from tidemill.config.run import RunConfig

CONTEXT = "mlflow.data.context"
UPLOADED = re.compile(r"^s3://.*/inputs/(?P<digest>[0-9a-f]{64})/")
DIGEST = 8
"""Letters of a digest, as many as MLflow's own ones have, and its lists show."""


def dataset_inputs(config: RunConfig) -> list[Any]:
    """What the run trains with and what it is scored on, as `mlflow.entities.DatasetInput`."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for source, use in ((config.data.train, "training"), (config.data.held_out, "evaluation")):
        if source is not None:
            kind = source.partition("://")[0] if "://" in source else "local"
            dataset = Dataset(name_of(source), digest_of(source), kind, json.dumps({"uri": source}))
            found.append(DatasetInput(dataset, [InputTag(CONTEXT, use)]))
    return found


def name_of(source: str) -> str:
    """What a person calls it: the file without its folders, or whatever else was named."""
    return PurePosixPath(source).name if source.endswith((".jsonl", ".parquet")) else source


def digest_of(source: str) -> str:
    """Of the rows, where they are a file of this machine or were uploaded as one; else of their name."""
    if uploaded := UPLOADED.search(source):
        return uploaded["digest"][:DIGEST]
    if Path(source).is_file():
        with Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST]
    return hashlib.sha256(source.encode()).hexdigest()[:DIGEST]
