"""The parameters of a pipeline, and the settings that result from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.observe.markdown import links, port_forward
from tidemill.steps.request import DEFAULTS, Request, settings_key
from tidemill.steps.validate import check_inputs
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


def test_empty_form_changes_nothing(addition: RunConfig) -> None:
    assert Request(addition.to_yaml()).settings() == addition


def test_fields_override_overrides_which_override_the_settings(addition: RunConfig) -> None:
    lines = "rollout.engines=2\n\n# a remark\n  seed=9  \n" + ON_CLUSTER
    asked = Request(addition.to_yaml(), lines, kubernetes_gpu_type="007", rollout_engines="4", trainer_ranks="2")
    config = replace(asked, kubernetes_image="r/i:1", kubernetes_gpu_hours="2", reward="math_verify").settings()
    assert [reward.function for reward in config.rewards] == ["math_verify"]
    assert (config.seed, config.rollout.engines, config.trainer.ranks) == (9, 4, 2)
    settings = config.kubernetes
    assert (settings.gpu_type, settings.image, settings.gpu_hours) == ("007", "r/i:1", 2.0)


def test_new_run_is_named_after_settings_and_kfp_run_and_registers_under_the_settings_name(
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


def test_settings_may_be_in_the_store(addition: RunConfig, store: ObjectStore) -> None:
    store.put_bytes("settings/run.yaml", addition.to_yaml().encode())
    uri, lines = store.uri("settings/run.yaml"), f"store.endpoint={store.endpoint}\nseed=3"
    config = Request(uri, lines).settings()
    assert (config.name, config.seed, config.store.endpoint) == ("addition", 3, store.endpoint)


def test_settings_of_an_earlier_run_are_copied_without_its_id(addition: RunConfig, store: ObjectStore) -> None:
    earlier = Request(addition.to_yaml(), kfp_run=KFP_RUN).settings()
    store.put_bytes(settings_key(earlier.name), earlier.to_yaml().encode())
    lines = f"store.endpoint={store.endpoint}\nseed=3"
    config = Request(earlier.name, lines, kfp_run="9" * 8).settings()
    assert (config.name, config.registered_model, config.seed) == ("addition-99999999", "addition", 3)
    with pytest.raises(ConfigError, match=r"config = 'other'. Allowed: .* the name of an earlier run"):
        Request("other", lines).settings()


def test_form_alone_is_a_run_on_kubernetes_whose_prompts_need_no_upload() -> None:
    config = Request(kfp_run=KFP_RUN).settings()
    assert (config.name, config.model) == ("post-training-1a2b3c4d", "Qwen/Qwen2.5-0.5B-Instruct")
    assert (config.cluster.provider, config.kubernetes.gpu_hours, config.trainer.steps) == ("kuberay", 8.0, 100)
    check_inputs(config)
    assert Request(**DEFAULTS).settings() == Request().settings()


def test_held_out_prompts_of_the_form_are_not_used_with_other_prompts() -> None:
    config = Request(data_train="hf://openai/gsm8k:train", data_held_out=DEFAULTS["data_held_out"]).settings()
    assert (config.data.train, config.data.held_out) == ("hf://openai/gsm8k:train", None)
    assert Request(data_held_out="hf://openai/gsm8k:test").settings().data.held_out == "hf://openai/gsm8k:test"


def test_default_of_a_field_leaves_the_setting_to_the_run_file(addition: RunConfig) -> None:
    assert Request(addition.to_yaml(), **DEFAULTS).settings() == addition
    changed = Request(addition.to_yaml(), **{**DEFAULTS, "trainer_steps": "7"}).settings()
    assert (changed.trainer.steps, changed.model) == (7, addition.model)


def test_numbers_of_json_stay_numbers(addition: RunConfig) -> None:
    options = {"budget": 12, "buffer": 4, "penalty": 1e-06}
    tree = addition.model_dump(mode="json") | {"rewards": [{"function": "overlong", "options": options}]}
    tree["registry"]["min_score"] = None
    assert Request(json.dumps(tree)).settings().rewards[0].options == options
    with pytest.raises(ConfigError, match="the key name is given twice"):
        Request('{"name": "a", "name": "b"}').settings()


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
    assert port_forward(address) == way


def test_links_on_this_machine_name_the_folder(addition: RunConfig) -> None:
    page = links(addition, "123")
    assert str(addition.folder) in page and "#/runs" not in page and "kubectl" not in page


def test_settings_that_are_not_yaml_are_refused() -> None:
    with pytest.raises(ConfigError, match="valid YAML"):
        Request("a: [").settings()


def test_form_with_fields_of_one_line_takes_json_and_lists(addition: RunConfig) -> None:
    tree = json.dumps(yaml.safe_load(addition.to_yaml()))
    asked = Request(tree, '[seed=9, trainer.steps=7, "data.system_prompt=Brief, please"]')
    config = asked.settings()
    assert (config.seed, config.trainer.steps) == (9, 7)
    assert config.data.system_prompt == "Brief, please"


def test_line_endings_of_windows_are_accepted(addition: RunConfig) -> None:
    text, lines = addition.to_yaml().replace("\n", "\r\n"), "seed=9\r\n# a remark\r\ntrainer.steps=7\r\n"
    config = Request("\ufeff" + text, lines).settings()
    assert (config.seed, config.trainer.steps, config.model) == (9, 7, addition.model)


def test_run_file_that_lost_its_line_breaks_says_so(addition: RunConfig) -> None:
    with pytest.raises(ConfigError, match="KFP's form drops line breaks"):
        Request(addition.to_yaml().replace("\n", "")).settings()


@pytest.mark.parametrize("text", ["run", "[1, 2]", "s3://bucket"])
def test_text_without_settings_is_refused(text: str) -> None:
    with pytest.raises((ConfigError, StoreError)):
        Request(text).settings()


@pytest.mark.parametrize("text", ["[seed=1", "[1]", "[{a: b}]", "[seed=[1]]"])
def test_list_with_other_values_than_strings_is_refused(addition: RunConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^overrides = .* or \[ENTRY, ENTRY\]"):
        Request(addition.to_yaml(), text).settings()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_engines", "2.5"),
        ("rollout_engines", "-1"),
        ("trainer_ranks", "one"),
        ("kubernetes_gpu_hours", "0"),
        ("kubernetes_image", "i"),
    ],
)
def test_invalid_field_is_refused(addition: RunConfig, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field.replace('_', '.', 1)} = "):
        replace(Request(addition.to_yaml(), ON_CLUSTER), **{field: value}).settings()


def test_binary_file_in_the_store_is_refused(store: ObjectStore) -> None:
    store.put_bytes("settings/run.yaml", b"\xff\xfe")
    with pytest.raises(ConfigError, match="a text file in UTF-8"):
        Request(store.uri("settings/run.yaml"), f"store.endpoint={store.endpoint}").settings()
