"""A run on Kubernetes is refused where its pods cannot work."""

from __future__ import annotations

import pytest
from config_rig import ON_KUBERNETES, parse, refusal

from tidemill.config.kubernetes_validation import RUNTIME_ENVIRONMENT


def test_a_run_on_kubernetes_needs_what_pods_can_share() -> None:
    assert parse(*ON_KUBERNETES).cluster.provider == "kuberay"
    for index, key in enumerate(("sync.transport", "store.endpoint", "tracking.uri"), start=1):
        left_out = [setting for number, setting in enumerate(ON_KUBERNETES) if number != index]
        assert refusal(*left_out).key == key


@pytest.mark.parametrize(
    "uri", ["sqlite:///runs/mlflow.db", "SQLite:///m.db", "file:///m", "file:m", "mlruns", "/mnt/m"]
)
def test_a_file_in_a_pod_is_refused_as_tracking_server(uri: str) -> None:
    assert refusal(*ON_KUBERNETES, f"tracking.uri={uri}").key == "tracking.uri"


@pytest.mark.parametrize("uri", ["https://mlflow", "postgresql://user@db/mlflow", "databricks", "databricks://team"])
def test_a_tracking_server_that_every_pod_reaches_is_accepted(uri: str) -> None:
    assert parse(*ON_KUBERNETES, f"tracking.uri={uri}").tracking.uri == uri


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("kubernetes.image=tidemill:latest", "kubernetes.image"),
        ("kubernetes.image=host:5000/tidemill", "kubernetes.image"),
        ("kubernetes.namespace=No_Such", "kubernetes.namespace"),
        ("trainer.ranks=9", "trainer.ranks"),
        ("kubernetes.gpu_hours=0", "kubernetes.gpu_hours"),
    ],
)
def test_settings_that_no_cluster_accepts_are_refused(override: str, key: str) -> None:
    assert refusal(*ON_KUBERNETES, override).key == key


def test_max_engines_is_refused_below_the_engines_and_with_kueue() -> None:
    assert refusal(*ON_KUBERNETES, "rollout.engines=3", "kubernetes.max_engines=2").key == "kubernetes.max_engines"
    assert refusal(*ON_KUBERNETES, "kubernetes.queue=team", "kubernetes.max_engines=2").key == "kubernetes.max_engines"


def test_settings_of_kubernetes_without_kuberay_are_refused() -> None:
    assert refusal("kubernetes.namespace=team").key == "kubernetes"


def test_the_keys_of_a_runtime_environment_are_those_that_ray_reads() -> None:
    from ray.runtime_env import RuntimeEnv

    of_ray_itself = {"_ray_release", "_ray_commit", "_inject_current_ray"}
    assert {name.lstrip("_") for name in RuntimeEnv.known_fields - of_ray_itself} == set(RUNTIME_ENVIRONMENT)


def test_a_key_of_the_store_in_the_settings_is_refused_without_being_shown() -> None:
    error = refusal(*ON_KUBERNETES, "kubernetes.env={TIDEMILL_S3_SECRET_KEY: abracadabra}")
    assert "kubernetes.store_secret" in str(error)
    assert "abracadabra" not in str(error)


@pytest.mark.parametrize("key", ["kubernetes.env", "kubernetes.runtime_env.env_vars"])
def test_a_secret_in_the_settings_is_refused_without_being_shown(key: str) -> None:
    error = refusal(*ON_KUBERNETES, f"{key}={{A: b, HF_TOKEN: abracadabra}}")
    assert error.key == f"{key}.HF_TOKEN" and "kubernetes.secrets" in error.fix
    assert "abracadabra" not in str(error)
    parse(*ON_KUBERNETES, f"{key}={{TOKENIZERS_PARALLELISM: 'false', KEY_ROTATION: 'on'}}")
