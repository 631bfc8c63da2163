"""Checks of a run on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.config.address import PASSWORD, SERVER, is_server, without_password
from tidemill.config.kubernetes import RANKS_PER_POD, KubernetesConfig
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError

OWN_VARIABLES = frozenset(
    {
        "TIDEMILL_S3_ACCESS_KEY",
        "TIDEMILL_S3_SECRET_KEY",
        "TIDEMILL_CONFIG",
        "TIDEMILL_ATTEMPT",
        "TIDEMILL_KFP_RUN",
    }
)
"""Environment variables that the run itself sets in its pods."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Last words of names, such as HF_TOKEN, whose values must not appear in settings, manifests and MLflow."""
RUNTIME_ENVIRONMENT = (
    "working_dir",
    "py_modules",
    "pip",
    "uv",
    "conda",
    "env_vars",
    "excludes",
    "py_executable",
    "java_jars",
    "config",
    "container",
    "image_uri",
    "nsight",
    "rocprof_sys",
    "worker_process_setup_hook",
)
"""The keys of a runtime environment that Ray reads; it ignores others with a warning in a log."""
PAGES = ("ray", "mlflow", "store")
"""The keys of `kubernetes.pages`."""
SPELLING = "Remove it or correct the spelling."


def kubernetes_mistakes(config: RunConfig) -> Iterator[ConfigError]:
    """Every mistake in the settings of a run with `cluster.provider: kuberay`."""
    yield from shared_storage(config)
    yield from environment(config.kubernetes)
    yield from pod_sizes(config.kubernetes)
    yield from engines_and_ranks(config)
    yield from pages(config.kubernetes)
    kubernetes = config.kubernetes
    if kubernetes.image.endswith(":latest"):
        fix = "The image behind latest may change between two pods of a run. Name a version."
        yield ConfigError("kubernetes.image", kubernetes.image, "a tag other than latest", fix)
    if kubernetes.gpu_hours is not None and kubernetes.gpu_resource is None:
        allowed = "null with kubernetes.gpu_resource = null, because the run has no GPU"
        fix = "The budget counts GPUs. Limit the time with kubernetes.max_hours."
        yield ConfigError("kubernetes.gpu_hours", kubernetes.gpu_hours, allowed, fix)


def shared_storage(config: RunConfig) -> Iterator[ConfigError]:
    """Settings that work only where all processes share one machine."""
    fix = "Engines, trainer and the steps of the pipeline run in pods that share neither disk nor memory."
    for key, value, allowed in (
        ("sync.transport", config.sync.transport, "object_store"),
        ("store.endpoint", config.store.endpoint, "the http(s)://host:port of an S3 server"),
        ("tracking.uri", config.tracking.uri, "the address of an MLflow server"),
    ):
        if value in ("shared_memory", "embedded", None) or (key == "tracking.uri" and value.startswith("sqlite:")):
            yield ConfigError(key, value, f"{allowed} with cluster.provider = kuberay", fix)


def environment(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Environment variables and keys of the runtime environment that are secret, reserved or unknown."""
    variables = kubernetes.runtime_env.get("env_vars")
    yield from secrets("kubernetes.env", kubernetes.env)
    yield from secrets("kubernetes.runtime_env.env_vars", variables if isinstance(variables, dict) else {})
    for name, value in kubernetes.env.items():
        if name in OWN_VARIABLES:
            shown = "(not shown)" if "KEY" in name else value
            fix = "Remove it. The keys of the object store come from the secret kubernetes.store_secret."
            yield ConfigError(f"kubernetes.env.{name}", shown, "a variable that the run does not set itself", fix)
    for name, value in kubernetes.runtime_env.items():
        if name not in RUNTIME_ENVIRONMENT:
            allowed = f"one of the keys {', '.join(RUNTIME_ENVIRONMENT)}"
            yield ConfigError(f"kubernetes.runtime_env.{name}", value, allowed, SPELLING)


def secrets(key: str, variables: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Environment variables whose names say that their values are secret."""
    for name in variables:
        if name.upper().rpartition("_")[2] in SECRETS and name not in OWN_VARIABLES:
            allowed = "no secret: settings are stored and shown"
            fix = "Put it into a Secret of the namespace, and name that Secret in kubernetes.secrets."
            yield ConfigError(f"{key}.{name}", "(not shown)", allowed, fix)


def pod_sizes(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Shared memory that exceeds the memory of its pod."""
    for role, pod in (("trainer", kubernetes.trainer), ("rollout", kubernetes.rollout)):
        if pod.shared_memory_gib > pod.memory_gib:
            key, allowed = f"kubernetes.{role}.shared_memory_gib", f"at most {pod.memory_gib}, the pod's memory_gib"
            yield ConfigError(key, pod.shared_memory_gib, allowed, "Shared memory counts as memory of the pod.")


def engines_and_ranks(config: RunConfig) -> Iterator[ConfigError]:
    """Numbers of engines and ranks that cannot be placed."""
    most, engines, ranks = config.kubernetes.max_engines, config.rollout.engines, config.trainer.ranks
    if most is not None and most < engines:
        yield ConfigError("kubernetes.max_engines", most, f"at least rollout.engines = {engines}", "Raise it.")
    if most is not None and most > engines and config.kubernetes.queue is not None:
        fix = "Kueue admits a run as a whole. Leave one of the two out."
        yield ConfigError("kubernetes.max_engines", most, "null with kubernetes.queue", fix)
    if ranks > RANKS_PER_POD and ranks % RANKS_PER_POD:
        allowed = f"at most {RANKS_PER_POD}, or a multiple of {RANKS_PER_POD}"
        yield ConfigError("trainer.ranks", ranks, allowed, f"A pod holds {RANKS_PER_POD} ranks.")


def pages(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Pages that a browser cannot open, that hold a password, or that nothing links to."""
    for name, page in kubernetes.pages.items():
        key = f"kubernetes.pages.{name}"
        if name not in PAGES:
            yield ConfigError(key, page, f"one of the keys {', '.join(PAGES)}", SPELLING)
        if PASSWORD.match(page):
            fix = "Everyone who sees the run sees its pages. Let the server ask for the password."
            yield ConfigError(key, without_password(page), "an address without a password", fix)
        elif not is_server(page):
            yield ConfigError(
                key, page, f"{SERVER}, with or without a path", "Give an address that a browser can open."
            )
