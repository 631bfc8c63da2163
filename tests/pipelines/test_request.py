"""What a person asks of a pipeline, and what the first step makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.config import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.links import forwarded, links
from tidemill.pipeline.request import Request
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import start_server, stop_server

EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
KFP_RUN = "1A2B3C4D-0000-4000-8000-000000000000"
ON_CLUSTER = (
    "cluster.provider=kuberay\nsync.transport=object_store\n"
    "store.endpoint=http://minio:9000\ntracking.uri=http://mlflow:5000\n"
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    server = start_server(tmp_path / "store")
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server.access_key)
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server.secret_key)
    yield ObjectStore.connect(server.endpoint, "tidemill", server.access_key, server.secret_key)
    stop_server(tmp_path / "store")


def test_form_left_open_changes_nothing(addition: RunConfig) -> None:
    assert Request(addition.to_yaml()).settings() == addition


def test_fields_go_before_overrides_and_overrides_before_the_settings(addition: RunConfig) -> None:
    lines = "rollout.engines=2\n\n# a remark\n  seed=9  \n" + ON_CLUSTER
    asked = Request(addition.to_yaml(), lines, gpu_type="007", engines=4.0, ranks=2, image="r/i:1", gpu_hours=2)  # type: ignore[arg-type]
    config = asked.settings()
    assert (config.seed, config.rollout.engines, config.trainer.ranks) == (9, 4, 2)
    settings = config.kubernetes
    assert (settings.gpu_type, settings.image, settings.gpu_hours) == ("007", "r/i:1", 2.0)


def test_new_run_is_called_after_settings_and_kfp_run_and_registers_under_the_settings_name(
    addition: RunConfig,
) -> None:
    config = Request(addition.to_yaml(), kfp_run=KFP_RUN).settings()
    assert (config.name, config.registered_model) == ("addition-1a2b3c4d", "addition")


def test_given_name_is_the_runs_name_whatever_kfp_calls_it(addition: RunConfig) -> None:
    config = Request(addition.to_yaml(), run_name="addition-0f0f0f0f", kfp_run=KFP_RUN).settings()
    assert (config.name, config.registered_model) == ("addition-0f0f0f0f", "addition")


def test_name_without_room_for_the_kfp_run_is_refused(addition: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"^name = "):
        Request(addition.to_yaml(), "name=" + "a" * 60, kfp_run=KFP_RUN).settings()


def test_settings_may_be_a_file_of_this_machine() -> None:
    assert Request(str(EXAMPLE)).settings().data.train == str(EXAMPLE.parent / "addition_train.jsonl")


def test_settings_may_lie_in_the_store(addition: RunConfig, store: ObjectStore) -> None:
    store.put_bytes("settings/run.yaml", addition.to_yaml().encode())
    uri, lines = store.uri("settings/run.yaml"), f"store.endpoint={store.endpoint}\nseed=3"
    config = Request(uri, lines).settings()
    assert (config.name, config.seed, config.store.endpoint) == ("addition", 3, store.endpoint)
    with pytest.raises(ConfigError, match=r"config = 's3://.*together with an override of store\.endpoint"):
        Request(uri).settings()


def test_links_in_a_cluster_lead_to_kfp_mlflow_store_and_dashboard(addition: RunConfig) -> None:
    lines = ON_CLUSTER + "kubernetes.pages.mlflow=https://mlflow.example.com"
    config = Request(addition.to_yaml(), lines, kfp_run=KFP_RUN).settings()
    page = links(config, KFP_RUN)
    assert f"[addition-1a2b3c4d](#/runs/details/{KFP_RUN})" in page
    assert "https://mlflow.example.com" in page and "http://minio:9000" in page
    assert "get pod -l tidemill.dev/run=addition-1a2b3c4d,ray.io/node-type=head" in page
    assert "tidemill stop addition-1a2b3c4d" in page


@pytest.mark.parametrize(
    ("address", "way"),
    [
        (
            "http://mlflow.tidemill.svc.cluster.local:5000",
            "`kubectl -n tidemill port-forward svc/mlflow 5000`, then http://127.0.0.1:5000",
        ),
        ("https://store.ml.svc:9000", "`kubectl -n ml port-forward svc/store 9000`, then https://127.0.0.1:9000"),
        ("https://mlflow.example.com", "https://mlflow.example.com"),
        ("http://minio:9000", "http://minio:9000"),
        ("embedded", "embedded"),
    ],
)
def test_address_of_a_service_is_given_as_a_browser_reaches_it(address: str, way: str) -> None:
    assert forwarded(address) == way


def test_links_on_this_machine_name_the_folder(addition: RunConfig) -> None:
    page = links(addition, "123")
    assert str(addition.folder) in page and "#/runs" not in page and "kubectl" not in page


def test_settings_that_are_no_yaml_are_refused() -> None:
    with pytest.raises(ConfigError, match="valid YAML"):
        Request("a: [").settings()
