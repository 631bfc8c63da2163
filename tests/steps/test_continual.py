"""Continual training: which prompts are new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, DataError
from tidemill.steps.continual import Start, new_prompts, prepare_continual, record_progress, source_name
from tidemill.steps.request import Request
from tidemill.store.server import open_store, start_server, stop_server, store_folder
from tidemill.tracking.registry import last_prompts

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    folder = tmp_path / "prompts"
    (folder / "2026-12").mkdir(parents=True)
    (folder / "2026-11-29.jsonl").write_text('{"prompt": "a"}')
    (folder / "2026-11-30.jsonl").write_text('{"prompt": "b"}\n')
    (folder / "2026-12/01.jsonl").write_text('{"prompt": "c"}\n')
    (folder / "notes.txt").write_text("not prompts")
    return folder


@pytest.mark.parametrize(
    ("last", "rows"),
    [(None, "abc"), ("2026-11-29.jsonl", "bc"), ("2026-11-30.jsonl", "c"), ("2026-11-29x", "bc")],
)
def test_prompts_after_the_last_used_ones_are_merged_in_order(
    addition: RunConfig, prompts: Path, last: str | None, rows: str
) -> None:
    source = new_prompts(addition, str(prompts), last)
    assert source is not None and source_name(source) == "2026-12/01.jsonl"
    assert Path(source).read_text() == "".join(f'{{"prompt": "{row}"}}\n' for row in rows)


def test_prompts_that_were_used_are_not_new(addition: RunConfig, prompts: Path) -> None:
    assert new_prompts(addition, str(prompts), "2026-12/01.jsonl") is None


def test_folder_without_prompts_is_refused(addition: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.jsonl file"):
        new_prompts(addition, str(tmp_path), None)


def test_missing_folder_is_refused_by_name(addition: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^prompts = '{tmp_path}/gone/'.* There is no {tmp_path}/gone\."):
        new_prompts(addition, f"{tmp_path}/gone/", None)


def test_new_prompts_of_the_store_become_one_object(addition: RunConfig, prompts: Path) -> None:
    start_server(store_folder(addition.output))
    try:
        with open_store(addition.store, addition.output) as store:
            store.upload_folder(prompts, "new/prompts")
            source = new_prompts(addition, "s3://tidemill/new/prompts/", "2026-11-29.jsonl")
            assert source is not None and source_name(source) == "2026-12/01.jsonl"
            assert store.get_bytes(source.removeprefix("s3://tidemill/")).count(b"\n") == 2
            assert new_prompts(addition, "s3://tidemill/new/prompts/", "2026-12/01.jsonl") is None
    finally:
        stop_server(store_folder(addition.output))


@pytest.mark.parametrize("source", ["s3://tidemill/one.jsonl", "reasoning_gym://sum?size=9"])
def test_any_other_source_is_always_new_and_recorded_unchanged(addition: RunConfig, source: str) -> None:
    assert new_prompts(addition, source, source) == source == source_name(source)


def prepared(
    config: RunConfig, run: str, prompts: Path, folder: Path, champion: str, validate: Callable[[RunConfig], RunConfig]
) -> RunConfig:
    """The settings that the first step makes of a run."""
    request = Request(config.to_yaml(), run_name=run)
    settings, word = prepare_continual(
        request, str(prompts), str(folder / "links.md"), champion=lambda config: champion, validate=validate
    )
    assert word == "train"
    return parse_config(settings)


def accept(config: RunConfig) -> RunConfig:
    return config


def refuse(config: RunConfig) -> RunConfig:
    raise DataError("a line is broken")


def test_resumed_run_trains_what_it_started_with(addition: RunConfig, prompts: Path, tmp_path: Path) -> None:
    first = prepared(addition, "c1", prompts, tmp_path, "1", accept)
    (prompts / "2026-12/02.jsonl").write_text('{"prompt": "d"}\n')
    assert prepared(addition, "c1", prompts, tmp_path, "2", accept) == first
    assert first.model == "models:/addition/1"
    other = prepared(addition, "c2", prompts, tmp_path, "2", accept)
    assert (other.model, source_name(other.data.train)) == ("models:/addition/2", "2026-12/02.jsonl")


def test_prompts_that_are_refused_are_not_kept_for_the_run(addition: RunConfig, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepared(addition, "c1", prompts, tmp_path, "1", refuse)
    assert Start.stored(addition.model_copy(update={"name": "c1"})) is None


def test_older_run_that_ends_later_does_not_move_progress_back(addition: RunConfig, prompts: Path) -> None:
    def trained(last: str | None) -> str:
        source = new_prompts(addition, str(prompts), last)
        return addition.model_copy(update={"data": addition.data.model_copy(update={"train": source})}).to_yaml()

    early = trained("2026-11-29.jsonl")
    (prompts / "2026-12/02.jsonl").write_text('{"prompt": "d"}\n')
    late = trained("2026-11-29.jsonl")
    for settings in (late, early):
        record_progress(settings, "{}")
        assert last_prompts(addition) == "2026-12/02.jsonl"


def test_held_out_prompts_are_required(addition: RunConfig, tmp_path: Path) -> None:
    lines = "data.held_out=null\nregistry.min_score=null\nevaluation.every=0"
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        prepare_continual(Request(addition.to_yaml(), lines), str(tmp_path), str(tmp_path / "links.md"))
