"""The manifests of a run as text, checked, for a person or for `kubectl apply -f -`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.pods import STORE_KEYS, node_labels
from tidemill.kuberay.schema import check


class Dumper(yaml.SafeDumper):
    """Writes text of several lines, such as the settings, as a block."""


def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """One text value."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, block)


def manifests(config: RunConfig, attempt: int = 1) -> str:
    """YAML of everything that the run makes in the cluster, below a list of what must be there already.

    Raises:
        ConfigError: the run is not for Kubernetes, or the cluster would refuse it.
    """
    if config.cluster.provider != "kuberay":
        fix = "Set cluster.provider=kuberay; other runs have no manifests."
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay", fix)
    job = ray_job(config, attempt)
    check(job)
    return "".join(f"# {line}\n" for line in needs(config)) + as_yaml(job)


def as_yaml(manifest: dict[str, Any]) -> str:
    """A manifest as YAML."""
    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def needs(config: RunConfig) -> Iterator[str]:
    """What the run finds in the cluster and does not make."""
    settings = config.kubernetes
    yield f"In namespace {settings.namespace} there must be:"
    yield f"- service account {settings.service_account}"
    yield f"- secret {settings.store_secret} with {' and '.join(STORE_KEYS.values())}"
    for name in settings.secrets:
        yield f"- secret {name}, whose keys become environment variables"
    for name in settings.image_pull_secrets:
        yield f"- secret {name} to pull the image with"
    if settings.queue is not None:
        yield f"- Kueue's LocalQueue {settings.queue}"
    classes = (settings.trainer_priority_class, settings.rollout_priority_class)
    for name in sorted({name for name in classes if name is not None}):
        yield f"- priority class {name} (of the whole cluster)"
    if labels := node_labels(config):
        yield f"- nodes with {', '.join(f'{key}={value}' for key, value in labels.items())}"
