"""The model registry of MLflow: its gate and its versions. Weights remain in the object store.

A version that passes the gate gets the alias `registry.alias`; it becomes the `champion` if it scores no less than the
current champion.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import ModelError, StoreError
from tidemill.tracking.mlflow_runs import git_revision
from tidemill.tracking.mlflow_server import make_client, tracking_uri

MODEL_URI = re.compile(r"^models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[A-Za-z][A-Za-z0-9_-]*))$")
CHAMPION = "champion"
PROMPTS = "tidemill.prompts"
"""Tag of a registered model: the last prompts of its continual training."""
MISSING = frozenset({"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"})


def gate(score_before: float | None, score_after: float | None, min_score: float | None) -> tuple[bool, str]:
    """Decide whether a trained policy may be registered: (passed, reason).

    Args:
        score_before: held-out score of the initial policy; None without a score.
        score_after: that of the trained policy.
        min_score: required score; None requires only that the score did not fall.
    """
    if score_after is None:
        return min_score is None, "there is no held-out score" + ("" if min_score is None else f" to reach {min_score}")
    if not math.isfinite(score_after):
        return False, f"the held-out score is {score_after}"
    if min_score is not None and score_after < min_score:
        return False, f"the held-out score {score_after:.4g} is below registry.min_score = {min_score:.4g}"
    if score_before is not None and score_after < score_before:
        return False, f"the held-out score fell from {score_before:.4g} to {score_after:.4g}"
    before = "" if score_before is None else f", before training {score_before:.4g}"
    return True, f"the held-out score is {score_after:.4g}{before}"


def register(config: RunConfig, source_uri: str, run_id: str, score: float | None, tags: Mapping[str, str]) -> str:
    """Register the model at `source_uri` as the newest version with the alias; returns the version.

    A repeated registration of the same source and run, as by a retried step, returns the existing version.

    Args:
        config: names the registry, the model and the alias.
        source_uri: `s3://...` of a Hugging Face folder.
        run_id: MLflow run of its training.
        score: held-out score.
        tags: further tags, such as `checkpoint_uri`.

    Raises:
        StoreError: MLflow cannot be reached or refuses.
        ConfigError: `tracking.uri` does not work.
    """
    client, name = make_client(tracking_uri(config)), config.registered_model
    from mlflow.exceptions import MlflowException

    described = {**description(config, score), **tags}
    try:
        ensure_model(client, name)
        version = existing_version(client, name, source_uri, run_id)
        if version is None:
            version = client.create_model_version(
                name, source_uri, run_id=run_id, tags=described, await_creation_for=0
            ).version
        client.set_registered_model_alias(name, config.registry.alias, version)
    except MlflowException as error:
        raise StoreError(f"model {name!r} cannot be registered at {tracking_uri(config)}: {error}") from error
    return str(version)


def promote(config: RunConfig, version: str, before: float | None, score: float | None) -> tuple[bool, str]:
    """Make a version the champion if it scores no less than the current one: (promoted, reason).

    The champion's score is `before` if the run began with the champion. Otherwise it is the score of its registration,
    if both were scored on the same prompts and rewards.

    Args:
        config: settings of the run that trained the version.
        version: of `config.registered_model`.
        before: held-out score of the initial model of the run.
        score: that of the version.

    Raises:
        StoreError: MLflow cannot be reached or refuses.
    """
    client, name = make_client(tracking_uri(config)), config.registered_model
    from mlflow.exceptions import MlflowException

    try:
        champion = current_champion(client, name)
        passed, reason = passes(config, champion, version, before, score)
        if passed:
            client.set_registered_model_alias(name, CHAMPION, version)
    except MlflowException as error:
        raise StoreError(f"{name}/{version} cannot be promoted at {tracking_uri(config)}: {error}") from error
    return passed, reason


def current_champion(client: Any, name: str) -> Any | None:
    """The version with the alias, or None."""
    aliases = client.get_registered_model(name).aliases
    return client.get_model_version(name, aliases[CHAMPION]) if CHAMPION in aliases else None


def passes(
    config: RunConfig, champion: Any | None, version: str, before: float | None, score: float | None
) -> tuple[bool, str]:
    """Decide whether a version may become the champion: (passed, reason)."""
    if champion is None or str(champion.version) == version:
        return True, "there is no other champion"
    if config.model == f"models:/{champion.name}/{champion.version}":
        current = before
    else:
        alike = champion.tags.get("scored_on") == scored_on(config)
        current = float(champion.tags["score"]) if alike and "score" in champion.tags else None
    name = f"the champion, version {champion.version},"
    if current is None or score is None:
        return False, f"it cannot be compared with {name} which was scored in another way"
    return score >= current, f"it scores {score:.4g}, and {name} {current:.4g}"


def scored_on(config: RunConfig) -> str:
    """Digest of the prompts' names and the rewards, which is equal for runs with comparable held-out scores."""
    tree = config.model_dump(mode="json", include={"data", "rewards", "evaluation"})
    tree["data"] = {key: value for key, value in tree["data"].items() if key not in ("train", "shuffle", "epochs")}
    tree["evaluation"] = tree["evaluation"]["max_prompts"]
    answers = {"max_new_tokens": config.rollout.max_new_tokens, "stop": config.rollout.stop}
    return hashlib.sha256(json.dumps(tree | answers, sort_keys=True).encode()).hexdigest()


def description(config: RunConfig, score: float | None) -> dict[str, str]:
    """Tags of every version."""
    tags = {
        "score": None if score is None else repr(score),
        "scored_on": None if score is None else scored_on(config),
        "git_revision": git_revision(),
        "config_digest": hashlib.sha256(config.to_yaml().encode()).hexdigest(),
        "base_model": config.model,
    }
    return {key: value for key, value in tags.items() if value is not None}


def ensure_model(client: Any, name: str) -> None:
    """Create the registered model if it does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def existing_version(client: Any, name: str, source_uri: str, run_id: str) -> str | None:
    """The version of this source and run, or None."""
    same = [v for v in client.search_model_versions(f"name='{name}'") if (v.source, v.run_id) == (source_uri, run_id)]
    return str(same[0].version) if same else None


def champion_version(config: RunConfig) -> str | None:
    """The champion of the run's registered model, or None.

    Raises:
        StoreError: MLflow does not answer.
    """
    with answered(config) as client:
        model = find_model(client, config)
        version = None if model is None else model.aliases.get(CHAMPION)
        return None if version is None else str(version)


def last_prompts(config: RunConfig) -> str | None:
    """The name that `save_prompts` stored, or None."""
    with answered(config) as client:
        return None if (model := find_model(client, config)) is None else model.tags.get(PROMPTS)


def save_prompts(config: RunConfig, name: str) -> None:
    """Store the name of the last prompts at the run's registered model."""
    with answered(config) as client:
        ensure_model(client, config.registered_model)
        client.set_registered_model_tag(config.registered_model, PROMPTS, name)


def find_model(client: Any, config: RunConfig) -> Any:
    """The registered model of a run, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(config.registered_model)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
        return None


@contextmanager
def answered(config: RunConfig) -> Iterator[Any]:
    """A client of the registry whose errors become a StoreError."""
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        yield client
    except MlflowException as error:
        raise StoreError(f"the registry at {tracking_uri(config)} does not answer or refuses: {error}") from error


def model_source(uri: str, tracking: str) -> str:
    """The `s3://` address of `models:/NAME/VERSION` or `models:/NAME@ALIAS`."""
    return str(model_version(uri, tracking).source)


def pinned_uri(uri: str, tracking: str) -> str:
    """`models:/NAME/VERSION` of the version that a URI names at this moment."""
    version = model_version(uri, tracking)
    return f"models:/{version.name}/{version.version}"


def model_version(uri: str, tracking: str) -> Any:
    """The version of MLflow's registry that a URI names.

    Args:
        uri: `models:/NAME/VERSION` or `models:/NAME@ALIAS`.
        tracking: MLflow tracking URI.

    Raises:
        ModelError: there is no such version; lists the existing ones.
        ConfigError: `tracking` does not work.
    """
    match = MODEL_URI.match(uri)
    if match is None:
        raise ModelError(f"model {uri!r} is not of the form models:/NAME/VERSION or models:/NAME@ALIAS")
    client, name = make_client(tracking), match["name"]
    from mlflow.exceptions import MlflowException

    try:
        if match["alias"]:
            return client.get_model_version_by_alias(name, match["alias"])
        return client.get_model_version(name, match["version"])
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise ModelError(f"model {uri!r}: the registry {tracking} does not answer: {error}") from error
        raise ModelError(f"model {uri!r} is not in the registry {tracking}: {inventory(client, name)}") from error


def inventory(client: Any, name: str) -> str:
    """The versions of a model, or else all models, in words."""
    versions = sorted(int(version.version) for version in client.search_model_versions(f"name='{name}'"))
    if versions:
        return f"versions of {name} are {', '.join(map(str, versions))}"
    models = sorted(model.name for model in client.search_registered_models())
    return f"its models are {', '.join(models)}" if models else "it is empty"
