"""Continual training: on from the champion of the registry, with the prompts that came since.

A run starts from the champion, so the gate between before and after compares with it, and `register` makes the new
version the champion if it passes. What a run began with is noted in the store, so that one that goes on later trains
the same, whatever came since.

runs/NAME/renewal.json     {"model": "models:/NAME/3", "train": "s3://..."}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, DataError
from tidemill.observe.events import Notice
from tidemill.steps.ends import begin
from tidemill.steps.request import Request
from tidemill.steps.steps import step
from tidemill.store.object_store import parse_uri
from tidemill.store.server import open_store
from tidemill.tracking.mlflow_server import await_server
from tidemill.tracking.registry import champion_version, last_prompts, save_prompts

MERGED = re.compile(r"/inputs/[0-9a-f]{64}/(?P<last>.+)$")
"""Where the new prompts of a run lie together; the name of the last file of them says how far they go."""
SUFFIX = ".jsonl"
TRAIN, WAIT = "train", "wait"


def prepare_continual(request: Request, prompts: str, page: str) -> tuple[str, str]:
    """Find the model to go on from and the new prompts, and check the run that they make.

    Args:
        request: what a person asks for; its model is where the first run starts, before there is a champion.
        prompts: a folder of `.jsonl` files, `s3://BUCKET/PREFIX/` or on this machine, of which those are taken whose
            names come after the last one that was trained with; or any source that `data.train` may be.
        page: file for the page of links.

    Returns:
        The resolved settings as YAML and `train`; without new prompts "" and `wait`.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    config = request.settings()
    if config.data.held_out is None:
        fix = "Name a file: the gate compares with the champion on it."
        raise ConfigError("data.held_out", None, "held-out prompts", fix)
    material = Material.noted(config) if request.run_name else None
    if material is None:
        material = Material.present(config, prompts)
    if material is None:
        text = f"# Nothing new\n\n{prompts} has no {SUFFIX} file after `{last_prompts(config)}`.\n"
        Path(page).write_text(text, encoding="utf-8")
        return "", WAIT
    tree = config.model_dump(mode="json") | {"model": material.model}
    tree["data"]["train"] = material.train
    changed = Request(yaml.safe_dump(tree, sort_keys=False), kfp_run=request.kfp_run, run_name=config.name)
    settings = begin(changed, page)
    material.note(config)
    return settings, TRAIN


@dataclass(frozen=True, slots=True)
class Material:
    """What a run trains: `model`, where it starts, and `train`, its prompts."""

    model: str
    train: str

    @classmethod
    def noted(cls, config: RunConfig) -> Material | None:
        """What a run of this name began with, None if there was none."""
        with open_store(config.store, config.output) as store:
            key = note_key(config.name)
            return cls(**json.loads(store.get_bytes(key))) if store.exists(key) else None

    @classmethod
    def present(cls, config: RunConfig, prompts: str) -> Material | None:
        """The champion, without one the model of the settings, and the new prompts; None without new ones."""
        source = new_prompts(config, prompts, last_prompts(config))
        if source is None:
            return None
        version = champion_version(config)
        return cls(config.model if version is None else f"models:/{config.registered_model}/{version}", source)

    def note(self, config: RunConfig) -> None:
        """Keep it for a run that goes on."""
        with open_store(config.store, config.output) as store:
            store.put_bytes(note_key(config.name), json.dumps(asdict(self)).encode())


def note_key(run: str) -> str:
    """Object of the store with what a run began with."""
    return f"runs/{run}/renewal.json"


def record_progress(config: str, summary: str) -> None:
    """Note how far the prompts were used, whatever came of it; a run that ends after a later one takes nothing back.

    Args:
        config: settings as YAML.
        summary: what `register` returned; it orders the steps.
    """
    del summary
    run = parse_config(config)
    with step("record_progress", run) as log:
        await_server(run, lambda text: log.write(Notice(text)))
        name, last = name_of(run.data.train), last_prompts(run)
        if MERGED.search(run.data.train) is None or last is None or name > last:
            save_prompts(run, name)


def name_of(source: str) -> str:
    """What a source of prompts is remembered by: the last file of those that were put together, else itself."""
    found = MERGED.search(source)
    return found["last"] if found else source


def new_prompts(config: RunConfig, prompts: str, last: str | None) -> str | None:
    """One source with the new rows, or None.

    Args:
        config: names the store, and the folder for rows that come from this machine.
        prompts: see `prepare_continual`.
        last: name of the last file that was trained with.

    Raises:
        DataError: the folder holds no file of rows.
        ConfigError: there is no such folder on this machine.
    """
    if prompts.startswith("s3://") and prompts.endswith("/"):
        bucket, prefix = parse_uri(prompts)
        with open_store(config.store.model_copy(update={"bucket": bucket}), config.output) as store:
            keys = [item.key for item in store.list(prefix)]
            found = [Rows(key.removeprefix(prefix), store.get_bytes(key)) for key in fresh(keys, prefix, last, prompts)]
        return stored(config, found)
    folder = Path(prompts)
    if not folder.is_dir():
        if "://" not in prompts and not folder.is_file():
            fix = f"There is no {folder.absolute()}."
            raise ConfigError("prompts", prompts, f"a folder of {SUFFIX} files, or what data.train may be", fix)
        return prompts
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}"))
    return written(config, [Rows(name, (folder / name).read_bytes()) for name in fresh(names, "", last, prompts)])


@dataclass(frozen=True, slots=True)
class Rows:
    """A file of prompts, by its name below the folder."""

    name: str
    data: bytes


def fresh(names: list[str], prefix: str, last: str | None, where: str) -> Iterator[str]:
    """Those after the last one, in the order of their names.

    Raises:
        DataError: there are no files at all.
    """
    rows = [name for name in names if name.endswith(SUFFIX)]
    if not rows:
        raise DataError(f"{where} holds no {SUFFIX} file; put rows there, under names that sort by their date")
    return (name for name in rows if last is None or name.removeprefix(prefix) > last)


def stored(config: RunConfig, found: list[Rows]) -> str | None:
    """The rows as one object of the run's store."""
    if not found:
        return None
    data = together(found)
    with open_store(config.store, config.output) as store:
        key = f"inputs/{hashlib.sha256(data).hexdigest()}/{found[-1].name}"
        store.put_bytes(key, data)
        return store.uri(key)


def written(config: RunConfig, found: list[Rows]) -> str | None:
    """The rows as one file below the folder of runs."""
    if not found:
        return None
    data = together(found)
    path = config.output.resolve() / "inputs" / hashlib.sha256(data).hexdigest() / found[-1].name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def together(found: list[Rows]) -> bytes:
    """One file of all rows."""
    return b"".join(rows.data if rows.data.endswith(b"\n") else rows.data + b"\n" for rows in found)
