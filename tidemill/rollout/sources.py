"""Prompt sources: rows of a local file, a file in the object store, a dataset of the hub or a task generator.

A row is a plain dict of JSON values. Every row has a non-empty prompt: a string, or chat messages.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

import yaml

from tidemill.config.data import DataConfig
from tidemill.config.reading import load_value, yaml_problem
from tidemill.errors import ConfigError, DataError

Row = dict[str, Any]
Located = tuple[str, Any]
Fetch = Callable[[str, Path], None]
"""Brings the object `s3://bucket/key` to a file: `models.locate.Locator.fetch_file`."""


class Rows(list[Row]):
    """Rows, and the place of each: FILE:LINE, or SOURCE: row NUMBER."""

    def __init__(self, rows: Iterable[Row], places: list[str]) -> None:
        super().__init__(rows)
        self.places = places


FORMS = (
    "a .jsonl or .parquet file, local or s3://BUCKET/KEY, hf://DATASET:SPLIT[?OPTION=VALUE], or "
    "reasoning_gym://TASK[?OPTION=VALUE]"
)


def load_rows(source: str, config: DataConfig, key: str = "data.train", fetch: Fetch | None = None) -> Rows:
    """Read and check all rows of a source.

    Args:
        source: what `data.train` or `data.held_out` holds.
        config: names of the columns.
        key: the setting that holds `source`, for messages.
        fetch: downloads from the run's object store.

    Raises:
        DataError: naming the source and the line or row.
        ConfigError: the form of the source is unknown, or needs a library that is not installed.
        StoreError: the object store does not answer.
    """
    places: list[str] = []
    rows = Rows([], places)
    for place, row in located_rows(source, config, key, fetch):
        rows.append(check_row(row, place, config.prompt_key))
        places.append(place)
    if not rows:
        raise DataError(f"{source}: it has no prompts; {key} needs at least one")
    return rows


def located_rows(source: str, config: DataConfig, key: str, fetch: Fetch | None) -> Iterable[Located]:
    """Rows, each with its place in the source."""
    scheme, separator, rest = source.partition("://")
    if separator and scheme in ("hf", "reasoning_gym"):
        name, _, query = rest.partition("?")
        options = query_options(query, key, source)
        if scheme == "hf":
            return hub_rows(name, options, key, config.prompt_key)
        return task_rows(name, options, config, key)
    path = Path(source)
    if scheme not in ("s3", source) or path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(key, source, FORMS, "Convert the file, or correct the name.")
    if separator:
        if fetch is None:
            raise ConfigError(key, source, "a local file, because no object store is configured", "Copy the file here.")
        return stored_rows(source, fetch, config.prompt_key)
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. Set {key} to a file that exists; a relative path starts at the config's folder."
        )
    return file_rows(path, source, config.prompt_key)


def stored_rows(source: str, fetch: Fetch, prompt_key: str) -> Iterator[Located]:
    """Rows of a file in the object store."""
    with TemporaryDirectory(prefix="tidemill-prompts-") as folder:
        path = Path(folder) / f"prompts{Path(source).suffix}"
        fetch(source, path)
        yield from file_rows(path, source, prompt_key)


def file_rows(path: Path, name: str, prompt_key: str) -> Iterator[Located]:
    """Rows of a local file; messages call it `name`."""
    return jsonl_rows(path, name) if path.suffix == ".jsonl" else parquet_rows(path, name, prompt_key)


def query_options(query: str, key: str, source: str) -> dict[str, Any]:
    """`seed=2&size=50` as options of one source; the values are YAML.

    Raises:
        ConfigError: it has another form.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        return {name: load_value(value) for name, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        why = yaml_problem(error) if isinstance(error, yaml.YAMLError) else error
        raise ConfigError(key, source, FORMS, f"Correct the part after the question mark: {why}.") from error


def jsonl_rows(path: Path, name: str) -> Iterator[Located]:
    """One JSON object a line; blank lines are allowed."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"{name}:{number}", json.loads(line)
            except ValueError as error:
                raise DataError(f"{name}:{number}: not valid JSON: {error}") from error


def parquet_rows(path: Path, name: str, prompt_key: str) -> Iterator[Located]:
    """Rows of a parquet file, numbered from 1; values without a JSON form, such as dates, become strings."""
    pyarrow = import_library("pyarrow", "pyarrow")
    parquet = import_library("pyarrow.parquet", "pyarrow")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{name}: row {number}", arrow_row(row, prompt_key)


def hub_rows(address: str, options: Mapping[str, Any], key: str, prompt_key: str) -> Iterator[Located]:
    """Rows of `DATASET:SPLIT`; the options go to `datasets.load_dataset`."""
    name, _, split = address.rpartition(":")
    source = f"hf://{address}"
    if not name or not split:
        raise ConfigError(key, source, FORMS, "Name the dataset and the split, for example hf://openai/gsm8k:train.")
    datasets = import_library("datasets", "datasets", key, source)
    try:
        rows = datasets.load_dataset(name, split=split, **options)
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be loaded: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{source}: row {number}", arrow_row(row, prompt_key)


def task_rows(task: str, options: Mapping[str, Any], config: DataConfig, key: str) -> Iterator[Located]:
    """Generated tasks; the column `entry` holds what `reasoning_gym` needs to score an answer."""
    source = f"reasoning_gym://{task}"
    gym = import_library("reasoning_gym", "reasoning-gym", key, source)
    try:
        entries = list(gym.create_dataset(task, **options))
    except (ValueError, TypeError, AssertionError) as error:
        fix = "Name a task of reasoning_gym, such as basic_arithmetic, and options that it accepts."
        raise DataError(f"{key} = {source} with options {options}: {error}. {fix}") from error
    for number, entry in enumerate(entries, start=1):
        row = {config.prompt_key: entry["question"], config.answer_key: entry["answer"], "entry": as_json(entry)}
        yield f"{source}: row {number}", row


def check_row(row: Any, where: str, prompt_key: str) -> Row:
    """Refuse a row that is not an object with a usable prompt."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object, not {type(row).__name__}")
    if prompt_key not in row:
        raise DataError(f"{where}: no column {prompt_key!r}; it has {sorted(row)}. Set data.prompt_key.")
    prompt = row[prompt_key]
    if isinstance(prompt, str) and prompt.strip():
        return row
    if isinstance(prompt, list) and prompt and all(map(is_message, prompt)):
        return row
    raise DataError(f"{where}: {prompt_key!r} must be a non-empty string or a list of chat messages, not {prompt!r}")


def is_message(message: Any) -> bool:
    """Whether this is `{"role": ..., "content": ...}` with string values."""
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def arrow_row(row: Mapping[str, Any], prompt_key: str) -> Row:
    """A row of a table. In its messages, keys without a value are left out: all structs of a column have all keys."""
    columns: Row = as_json(row)
    messages = columns.get(prompt_key)
    return columns | {prompt_key: without_nulls(messages)} if isinstance(messages, list) else columns


def without_nulls(value: Any) -> Any:
    """The value without the keys of mappings that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_json(value: Any) -> Any:
    """The value after a round trip through JSON; values without a JSON form become strings."""
    return json.loads(json.dumps(value, default=str))


def import_library(module: str, package: str, key: str = "data.train", value: str = "*.parquet") -> Any:
    """Import an optional library when a source needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # Some dependencies of reasoning-gym have invalid escapes, which warn whenever they are compiled.
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        allowed = f"a source whose library is installed ({error})"
        raise ConfigError(key, value, allowed, f"Install it: pip install {package}.") from error
