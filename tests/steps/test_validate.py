"""What is checked before a run uses any GPU."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rollout_rig import CharTokenizer
from tidemill_components.validate import validate
from tiny_model import CONTEXT, make_tiny_model

from tidemill.config.data import DataConfig
from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.driver.resume import identity
from tidemill.errors import (
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    StoreError,
    StoreRefusedError,
    TidemillError,
)
from tidemill.models.locate import Locator
from tidemill.observe.events import read_events
from tidemill.rollout.prompts import PromptSet
from tidemill.steps.request import DEFAULTS
from tidemill.steps.validate import check_inputs, check_model, check_prompts
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.seaweedfs import folder_keys
from tidemill.store.server import embedded_store, open_store

BAD = "name: probe"
EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
OVERLONG = ("rewards.0.function=overlong", "registry.min_score=null")
EMPTY_FORM = ("",) * (3 + len(DEFAULTS))
CHAT = [{"role": "user", "content": "1 + 1"}]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.epochs=1", "trainer.ppo_mini_batch_size=81"], r"data.epochs = 1\. .* 80 prompts .* step of 81 groups"),
        (
            ["rewards.0.options={bonus: 1}"],
            r"rewards.0.options = \{bonus: 1\}\. .*unexpected .* 'bonus'",
        ),
        (["rewards.0.options={answer: 1}"], r"rewards.0.options = .*'answer'"),
        ([*OVERLONG, "rewards.0.options={budget: 8}"], r"options = .*missing .* 'buffer'"),
        (
            [*OVERLONG, "rewards.0.options={budget: 8, buffer: 9}"],
            r"rewards.0.options = \{.*buffer: 9\}\. .*0 < buffer <= budget",
        ),
        (["rewards.0.function=rewards_here:narrow"], r"rewards.0.function = .*unexpected keyword argument 'extra'"),
        (["rewards.0.function=rewards_here:later"], r"rewards.0.function = .*a function that is not async.*plain"),
        (["rewards.0.function=rewards_here:judge"], r"rewards.0.function = .*a function that is not async.*plain"),
        (["rewards.0.function=rewards_here:trl"], r"rewards.0.function = .*'completions' is that of a reward of TRL"),
        (["rewards.0.function=rewards_here:compute_score"], r"rewards.0.function = .*'solution_str' .* of verl"),
        (["rewards.0.options={response: raw}"], r"rewards.0.options.*response must be a text that has"),
        (["rewards.0.function=rewards_here:wide"], r"rewards.0.options = \{\}\. .*missing a required .*'bonus'"),
    ],
)
def test_inputs_that_cannot_be_trained_are_refused(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text(
        "def narrow(response, *, prompt, answer): return 0.0\n"
        "def wide(response, *, prompt, answer, extra, bonus): return bonus\n"
        "async def later(response, *, prompt, answer, extra): return 0.0\n"
        "class Judge:\n    async def __call__(self, response, *, prompt, answer, extra): return 0.0\n"
        "judge = Judge()\n"
        "def trl(prompts, completions, answer, **kwargs): return [0.0]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_inputs(load_config(EXAMPLE, overrides))


@pytest.mark.parametrize(
    "options",
    [
        "{budget: '8', buffer: 4}",
        "{budget: 8.5, buffer: 4}",
        "{budget: 8, buffer: true}",
        "{budget: 8, buffer: 4, penalty: -1}",
        "{budget: 8, buffer: 4, penalty: 0}",
        "{budget: 8, buffer: 4, penalty: .nan}",
        "{budget: 8, buffer: 4, penalty: true}",
    ],
)
def test_invalid_options_of_overlong_are_refused(options: str, addition: RunConfig) -> None:
    text = changed(addition, *OVERLONG, f"rewards.0.options={options}")
    with pytest.raises(ConfigError, match=r"rewards\.0\.options = \{budget: .*a number above 0 as penalty"):
        check_inputs(parse_config(text))


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ({"prompt": CHAT, "answer": "2"}, [], r"data.system_prompt = 'You are a calculator.'. Allowed: null if"),
        ({"prompt": "1 + 1", "answer": "two"}, [], r"rows\.jsonl:1 has the answer 'two', which is not a number"),
        (
            {"prompt": "1 + 1", "answer": " "},
            ["rewards.0.function=math_verify"],
            r"rows\.jsonl:1 has no answer in 'answer'",
        ),
        ({"prompt": "1 + 1", "answer": "2"}, ["rewards.0.function=reasoning_gym"], "no column 'entry'"),
    ],
)
def test_data_that_does_not_match_the_settings_is_refused(
    row: dict[str, Any], overrides: list[str], message: str, addition: RunConfig, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    text = changed(addition, f"data.train={path}", f"data.held_out={path}", *overrides)
    with pytest.raises(TidemillError, match=message):
        check_inputs(parse_config(text))


def test_one_plain_text_prompt_is_enough_for_a_system_prompt(addition: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": CHAT, "answer": "2"}) + "\n")
    check_inputs(parse_config(changed(addition, f"data.held_out={path}")))


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.epochs=1", "trainer.ppo_mini_batch_size=80"],
        ["rewards.0.function=builtins:max"],  # which has no signature
        ["rewards.0.function=rewards_taken:score", "rewards.0.options={bonus: 1}"],
        ["rewards.0.function=rewards_taken:Score.of"],
    ],
)
def test_inputs_that_can_be_trained_are_accepted(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_taken.py").write_text(
        "def score(response, *, prompt, answer, extra, bonus=0.0): return bonus\n"
        "class Score:\n"
        "    @staticmethod\n"
        "    def of(text, **columns): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_inputs(load_config(EXAMPLE, overrides))


class Artifact:
    """What KFP hands to a component as an output."""

    def __init__(self, path: str = "/dev/null") -> None:
        self.path, self.metadata = path, {}

    def log_metric(self, name: str, value: float) -> None:
        raise AssertionError("nothing to log")


def validated(config: str) -> str:
    text: str = validate.python_func(config, *EMPTY_FORM, Artifact())
    return text


def test_validate_returns_the_settings_with_every_default(addition: RunConfig) -> None:
    assert parse_config(validated(addition.to_yaml())) == addition


def test_validate_announces_itself(addition: RunConfig) -> None:
    validated(addition.to_yaml())
    assert [event.kind for event in read_events(addition.folder / "events.jsonl")] == ["phase_started"]


def changed(config: RunConfig, *overrides: str) -> str:
    return parse_config(config.to_yaml(), overrides).to_yaml()


def test_broken_prompt_line_is_named_by_number_and_recorded(addition: RunConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        validated(changed(addition, f"data.train={prompts}"))
    failure = Failure.read(addition.folder)
    assert failure is not None
    assert (failure.step, failure.expected, failure.retryable) == ("validate", True, False)


def test_settings_that_are_too_long_for_an_argument_are_refused(addition: RunConfig) -> None:
    data = addition.data.model_copy(update={"system_prompt": "Be brief. " * 4000})
    with pytest.raises(ConfigError, match=r"^config = '\d+ bytes'. Allowed: at most 32768 with every default"):
        validated(addition.model_copy(update={"data": data}).to_yaml())


def test_unknown_reward_is_refused(addition: RunConfig) -> None:
    with pytest.raises(RewardError, match="exact_numbr"):
        validated(changed(addition, "rewards.0.function=exact_numbr"))


def test_missing_model_folder_is_refused(addition: RunConfig) -> None:
    with pytest.raises(Exception, match="no-such-model"):
        validated(changed(addition, "model=./no-such-model"))


def test_answer_longer_than_the_models_context_is_refused(addition: RunConfig, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", 0)
    model, limit = f"model={tmp_path / 'model'}", CONTEXT - addition.data.max_prompt_tokens
    check_model(parse_config(changed(addition, model, f"rollout.max_new_tokens={limit}")), {}, trains=True)
    with pytest.raises(ConfigError, match=f"max_new_tokens = {CONTEXT + 1}. Allowed: at most the {CONTEXT} tokens"):
        validated(changed(addition, model, f"rollout.max_new_tokens={limit + 1}"))


def test_tensor_parallel_size_must_divide_the_heads(addition: RunConfig, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", 0)
    model, size = f"model={tmp_path / 'model'}", "rollout.tensor_parallel_size"
    check_model(parse_config(changed(addition, model, f"{size}=2")), {}, trains=True)
    with pytest.raises(ConfigError, match=f"{size} = 3. Allowed: a divisor of the 4 attention heads"):
        check_model(parse_config(changed(addition, model, f"{size}=3")), {}, trains=True)


def test_context_of_a_published_model_on_this_machine_is_known(
    addition: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    make_tiny_model(tmp_path / "models/SmolLM2-135M-Instruct", 0)
    with pytest.raises(ConfigError, match="tokens of context of HuggingFaceTB/SmolLM2"):
        check_model(parse_config(changed(addition, f"rollout.max_new_tokens={CONTEXT}")), {}, trains=True)


def with_rows(config: RunConfig, folder: Path, rows: list[dict[str, Any]], *overrides: str) -> str:
    """The settings with a tiny model and these rows."""
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", 0)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"answer": "1"} | row) for row in rows))
    named = f"model={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}", "data.held_out=null"
    return changed(
        config, *named, "evaluation.every=0", "registry.min_score=null", "data.system_prompt=null", *overrides
    )


def test_every_prompt_is_rendered_and_the_lines_that_cannot_be_are_named(addition: RunConfig, tmp_path: Path) -> None:
    text = with_rows(addition, tmp_path, [{"prompt": "w5"}, {"prompt": "w5 \ud83d"}, {"prompt": "w6"}])
    message = (
        r"^data\.train: 1 of 3 prompts cannot be rendered; .*\n  .*rows\.jsonl:2: the prompt has '\\ud83d', half of"
    )
    with pytest.raises(DataError, match=message):
        validated(text)
    (tmp_path / "model/chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    message = r"3 of 3 prompts cannot .*\n.*rows\.jsonl:1: the chat template refuses it: System role not supported\."
    with pytest.raises(DataError, match=message):
        validated(text)


def test_a_token_beyond_the_embedding_is_refused_with_its_id_and_the_size(addition: RunConfig, tmp_path: Path) -> None:
    text = with_rows(addition, tmp_path, [{"prompt": "w5"}])
    path = tmp_path / "model/tokenizer.json"
    path.write_text(path.read_text().replace('"w5": 5,', '"w5": 200,'))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the token 'w5' has the id 200, but .* embedding has 96 rows"):
        validated(text)


def test_lengths_of_the_prompts_are_said_and_too_long_ones_do_not_count(
    addition: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "w5 w6 w7"}, {"prompt": "w95"}, {"prompt": "w5 w6 w7 w8"}]
    small = "data.max_prompt_tokens=3", "trainer.ppo_mini_batch_size=2"
    validated(with_rows(addition, tmp_path, rows, *small, "data.epochs=1"))
    assert (
        "data.train: 3 prompts of up to 4 tokens, 1 more than data.max_prompt_tokens = 3; " in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match=r"data\.epochs = 1\. .* 2 prompts for one optimizer step of 3 groups"):
        validated(with_rows(addition, tmp_path, rows, small[0], "trainer.ppo_mini_batch_size=3", "data.epochs=1"))
    with pytest.raises(DataError, match=r"data\.train: all 3 prompts .* Raise data\.max_prompt_tokens"):
        validated(with_rows(addition, tmp_path, rows[::2] + rows[2:], "data.max_prompt_tokens=2"))


def test_progress_of_a_long_check_is_said() -> None:
    rows = [{"prompt": f"question {number}"} for number in range(2500)]
    said: list[str] = []
    data = DataConfig(train="x.jsonl")
    assert check_prompts(PromptSet(rows, CharTokenizer(), data, 0), "data.train", data, said.append, report_s=0) == 2500
    assert said[:3] == [f"data.train: {done} of 2500 prompts are rendered" for done in (1000, 2000, 2500)]


@pytest.mark.parametrize("method", ["bitsandbytes", "awq", "gptq", "fp8", "compressed-tensors", "mxfp4"])
def test_a_quantised_model_is_refused_before_anything_starts(addition: RunConfig, tmp_path: Path, method: str) -> None:
    text = with_rows(addition, tmp_path, [{"prompt": "w5"}])
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(
        ModelError, match=rf"is quantised .* config\.json has a quantization_config \({method}\)\. Name"
    ):
        validated(text)


def test_a_model_of_the_store_is_checked_without_its_weights(addition: RunConfig, tmp_path: Path) -> None:
    text = with_rows(
        addition, tmp_path, [{"prompt": "w5"}], "model=s3://tidemill/models/tiny", "data.max_prompt_tokens=8"
    )
    config = parse_config(text)
    with open_store(config.store, config.output) as store:
        store.upload_folder(tmp_path / "model", "models/tiny")
        folder = Locator.of(config).fetch_settings(config.model, tmp_path / "settings", [])
        assert folder is not None
        assert (folder / "model.safetensors").stat().st_size == 0
        assert (folder / "tokenizer.json").stat().st_size > 0
        inputs = check_inputs(config)
        check_model(config, inputs, trains=True)
        store.delete("models/tiny/model.safetensors")
        with pytest.raises(ModelError, match=r"not a model folder: it lacks model\.safetensors"):
            check_model(config, inputs, trains=True)


def test_a_model_that_is_nowhere_is_said_with_the_folder_that_does_not_exist(
    addition: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said: list[str] = []
    config = addition.model_copy(update={"model": "nobody/nothing"})
    check_model(config, check_inputs(config), trains=True, say=said.append)
    [line] = said
    folder = Path("nobody/nothing").absolute()
    assert f"nobody/nothing was not found in the folder {folder} (does not exist); the Hugging Face cache" in line


@pytest.mark.parametrize("key", ["train", "held_out"])
def test_row_without_the_answer_that_the_reward_needs_is_refused(addition: RunConfig, tmp_path: Path, key: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "reply": "2"}\n')
    with pytest.raises(DataError, match=rf"data\.{key} = .*rows\.jsonl:2 has no answer in 'answer', which"):
        validated(changed(addition, f"data.{key}={tmp_path / 'rows.jsonl'}"))


def test_unreachable_tracking_server_is_refused(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        setting = f"tracking.uri=http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"tracking\.uri = 'http://127.*refused"):
            validated(changed(addition, setting))
        server.listen()
        validated(changed(addition, setting))


def test_unreachable_store_is_refused(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", "b")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        validated(changed(addition, "store.endpoint=http://127.0.0.1:1"))


def test_store_that_may_only_be_read_is_refused(
    addition: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, keys = tmp_path / "elsewhere", {"accessKey": "reader", "secretKey": "secret-of-the-reader"}
    folder.mkdir()
    owner = folder_keys(folder)
    identities = json.loads((folder / "s3.json").read_text())["identities"]
    identities.append({"name": "reader", "credentials": [keys], "actions": ["Read", "List"]})
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    with embedded_store(folder) as server:
        text = changed(addition, f"store.endpoint={server.endpoint}")
        for access, secret in (owner, tuple(keys.values())):
            monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", access)
            monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", secret)
            if access == "reader":
                with pytest.raises(StoreRefusedError, match=r"runs/addition/probe at .*AccessDenied"):
                    validated(text)
            else:
                validated(text)


def test_run_that_must_not_resume_is_refused_once_there_is_a_checkpoint(addition: RunConfig, tmp_path: Path) -> None:
    text = changed(addition, "checkpoint.resume=never")
    validated(text)
    with open_checkpoints(addition) as checkpoints:
        checkpoints.commit(1, tmp_path, {"identity": identity(addition), "position": {"step": 1}})
    with pytest.raises(ConfigError, match=r"checkpoint\.resume = 'never'. Allowed: auto, because addition has"):
        validated(text)
    validated(addition.to_yaml())


def test_settings_that_a_checkpoint_does_not_fit_are_refused_first(addition: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.safetensors").touch()
    with open_checkpoints(addition) as checkpoints:
        checkpoints.commit(1, tmp_path / "parts", {"identity": identity(addition), "position": {"step": 1}})
    with pytest.raises(
        ConfigError, match=r"^asynchrony\.max_staleness = 2. Allowed: 1, the value at the start of addition"
    ):
        validated(changed(addition, "asynchrony.max_staleness=2"))


def test_settings_that_a_checkpoint_in_a_store_elsewhere_does_not_fit_are_refused_first(
    addition: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_store(tmp_path / "elsewhere") as server:
        monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server.access_key)
        monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server.secret_key)
        run = parse_config(changed(addition, f"store.endpoint={server.endpoint}"))
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts/model.safetensors").touch()
        with open_checkpoints(run) as checkpoints:
            checkpoints.commit(1, tmp_path / "parts", {"identity": identity(run), "position": {"step": 1}})
        validated(changed(run, "trainer.steps=30"))
        with pytest.raises(
            ConfigError, match=r"^asynchrony\.max_staleness = 2. Allowed: 1, the value at the start of addition"
        ):
            validated(changed(run, "asynchrony.max_staleness=2"))


def test_missing_store_key_is_refused(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_S3_ACCESS_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"TIDEMILL_S3_ACCESS_KEY = null\. .* the parameter store_secret"):
        validated(changed(addition, "store.endpoint=http://127.0.0.1:1"))
