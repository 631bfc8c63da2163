from __future__ import annotations

import json
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tidemill.config.data import DataConfig
from tidemill.errors import ConfigError, DataError
from tidemill.rollout.sources import Row, load_rows


def load(source: object, **config: Any) -> list[Row]:
    return load_rows(str(source), DataConfig(train=str(source), **config))


def jsonl(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_jsonl_rows_are_read_and_blank_lines_allowed(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "1+1?", "answer": "2"}', "", '{"prompt": "é", "level": 3}', "")
    assert load(path) == [{"prompt": "1+1?", "answer": "2"}, {"prompt": "é", "level": 3}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', "not valid JSON"),
        ('["b"]', "must be an object, not list"),
        ('{"question": "b"}', r"no column 'prompt'; it has \['question'\]"),
        ('{"prompt": "  "}', "must be a non-empty string"),
        ('{"prompt": []}', "must be a non-empty string or a list"),
        ('{"prompt": [{"role": "user"}]}', "list of chat messages"),
        ('{"prompt": 5}', "not 5"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = jsonl(tmp_path, '{"prompt": "a"}', "", line)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert f"{path}:3:" in str(caught.value)


def test_bytes_that_are_no_text_are_named_with_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        load(path)


def test_a_missing_file_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file. Set data.train"):
        load(tmp_path / "none.jsonl")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no prompts"):
        load(jsonl(tmp_path, "", ""))


@pytest.mark.parametrize("source", ["prompts.csv", "s3://bucket/prompts", "hf://no-split", "hf://:train"])
def test_an_unknown_form_is_refused_with_the_known_ones(source: str) -> None:
    with pytest.raises(ConfigError, match="hf://DATASET:SPLIT"):
        load(source)


def test_parquet_rows_are_read_as_json_values(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "day": date(2026, 1, 2), "n": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load(path) == [{"prompt": [{"role": "user", "content": "hi"}], "day": "2026-01-02", "n": 1}]


def test_every_row_has_a_place(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "a"}', "", '{"prompt": "b"}')
    assert load_rows(str(path), DataConfig(train=str(path))).places == [f"{path}:1", f"{path}:3"]
    table = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), table)
    assert load_rows(str(table), DataConfig(train=str(table))).places == [f"{table}: row 1", f"{table}: row 2"]


def test_null_keys_of_messages_in_parquet_are_left_out(tmp_path: Path) -> None:
    """All structs of a column have all keys: a message without tool calls has them as null."""
    path = tmp_path / "prompts.parquet"
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages, "answer": None}]), path)
    kept = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    assert load(path) == [{"prompt": [messages[0], kept], "answer": None}]


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a readable parquet file"):
        load(path)


def test_a_hub_source_without_its_library_says_what_to_install() -> None:
    if "datasets" in sys.modules:
        pytest.skip("datasets is installed")
    with pytest.raises(ConfigError, match="pip install datasets"):
        load("hf://openai/gsm8k:train")


def test_reasoning_gym_rows_carry_the_entry_that_scores_them() -> None:
    rows = load("reasoning_gym://basic_arithmetic?size=4&seed=1")
    assert len(rows) == 4
    assert rows[0]["entry"]["question"] == rows[0]["prompt"]
    assert rows[0]["entry"]["metadata"]["source_dataset"] == "basic_arithmetic"
    assert json.loads(json.dumps(rows)) == rows


def test_options_of_a_source_make_its_rows() -> None:
    rows = load("reasoning_gym://basic_arithmetic?seed=2&size=3")
    assert len(rows) == 3
    assert rows == load("reasoning_gym://basic_arithmetic?size=3&seed=2")
    assert rows != load("reasoning_gym://basic_arithmetic?size=3&seed=1")


@pytest.mark.parametrize("query", ["seed", "seed=[", "=&"])
def test_options_of_another_form_are_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="question mark"):
        load(f"reasoning_gym://basic_arithmetic?{query}")


@pytest.mark.parametrize(
    ("task", "query"), [("no_such_task", ""), ("basic_arithmetic", "?colour=3"), ("basic_arithmetic", "?size=many")]
)
def test_an_unknown_task_or_option_is_refused(task: str, query: str) -> None:
    with pytest.raises(DataError, match=f"data.train = reasoning_gym://{task}.*Name a task"):
        load(f"reasoning_gym://{task}{query}")


def fetch_from(folder: Path) -> Any:
    """Of a store whose objects are the files of a folder."""

    def fetch(uri: str, path: Path) -> None:
        shutil.copy(folder / uri.rpartition("/")[2], path)

    return fetch


def test_file_of_the_object_store_is_read_and_called_by_its_uri(tmp_path: Path) -> None:
    jsonl(tmp_path, '{"prompt": "a"}', "{")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["b"]}), tmp_path / "p.parquet")
    config = DataConfig(train="s3://data/p.parquet")
    assert load_rows(config.train, config, fetch=fetch_from(tmp_path)) == [{"prompt": "b"}]
    with pytest.raises(DataError, match=r"^s3://data/prompts\.jsonl:2: not valid JSON"):
        load_rows("s3://data/prompts.jsonl", config, fetch=fetch_from(tmp_path))


@pytest.mark.parametrize("source", ["s3://data/prompts", "s3://data/prompts.csv", "gs://data/prompts.jsonl"])
def test_other_objects_are_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s3://BUCKET/KEY"):
        load_rows(source, DataConfig(train=source), fetch=fetch_from(tmp_path))


def test_object_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="no object store is configured"):
        load("s3://data/prompts.jsonl")
