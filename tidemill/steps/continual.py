"""Continual training: train the champion of the registry on the prompts that were added since its training.

A run starts from the champion. So the gate between the scores before and after compares with the champion, and
`register` makes the new version the champion if it passes. The store records what a run started with, so that a resumed
run trains the same, whatever was added later.

runs/NAME/continual.json     {"model": "models:/NAME/3", "train": "s3://..."}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, DataError
from tidemill.observe.events import Notice
from tidemill.observe.markdown import links
from tidemill.steps.refusal import explained
from tidemill.steps.request import Request
from tidemill.steps.run_folder import step
from tidemill.steps.validate import validate_run
from tidemill.store.object_store import parse_uri
from tidemill.store.server import open_store
from tidemill.tracking.mlflow_server import await_server, experiment_of
from tidemill.tracking.registry import champion_version, last_prompts, save_prompts

MERGED = re.compile(r"/inputs/[0-9a-f]{64}/(?P<last>.+)$")
"""The merged prompts of a run, named after the last file of them."""
SUFFIX = ".jsonl"
TRAIN, WAIT = "train", "wait"


@explained()
def prepare_continual(
    request: Request,
    prompts: str,
    page: str,
    *,
    champion: Callable[[RunConfig], str | None] = champion_version,
    validate: Callable[[RunConfig], RunConfig] = validate_run,
) -> tuple[str, str]:
    """Find the champion and the new prompts, and validate the run.

    Args:
        request: the parameters of the pipeline; its model is trained first, before a champion exists.
        prompts: a folder of `.jsonl` files, `s3://BUCKET/PREFIX/` or on this machine, from which the files are used
            whose names sort after the last used one; or any value of `data.train`.
        page: file for the links to follow the run.
        champion: finds the version of the champion.
        validate: checks the run.

    Returns:
        The settings with every default as YAML, and `train`; without new prompts "" and `wait`.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    config = request.settings()
    if config.data.held_out is None:
        fix = "Name a file: the gate compares with the champion on it."
        raise ConfigError("data.held_out", None, "held-out prompts", fix)
    start = Start.stored(config) if request.run_name else None
    if start is None:
        last = last_prompts(config)
        source = new_prompts(config, prompts, last)
        if source is None:
            text = f"# Nothing new\n\n{prompts} has no {SUFFIX} file after `{last}`.\n"
            Path(page).write_text(text, encoding="utf-8")
            return "", WAIT
        version = champion(config)
        start = Start(config.model if version is None else f"models:/{config.registered_model}/{version}", source)
    tree = config.model_dump(mode="json") | {"model": start.model}
    tree["data"]["train"] = start.train
    changed = parse_config(yaml.safe_dump(tree))
    Path(page).write_text(links(changed, request.kfp_run), encoding="utf-8")
    validated = validate(changed)
    Path(page).write_text(links(changed, request.kfp_run, experiment_of(changed)), encoding="utf-8")
    start.store(config)
    return validated.to_yaml(), TRAIN


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts with: `model`, and `train`, the source of its prompts."""

    model: str
    train: str

    @classmethod
    def stored(cls, config: RunConfig) -> Start | None:
        """What a run of this name started with; None if it has not started."""
        with open_store(config.store, config.output) as store:
            key = start_key(config.name)
            return cls(**json.loads(store.get_bytes(key))) if store.exists(key) else None

    def store(self, config: RunConfig) -> None:
        """Write it for a resumed run."""
        with open_store(config.store, config.output) as store:
            store.put_bytes(start_key(config.name), json.dumps(asdict(self)).encode())


def start_key(run: str) -> str:
    return f"runs/{run}/continual.json"


@explained()
def record_progress(config: str, summary: str) -> None:
    """Record the last prompts that were used, also of a model that was not registered; never moves backwards.

    Args:
        config: settings as YAML.
        summary: result of `register`; it only orders the steps.
    """
    del summary
    run = parse_config(config)
    with step("record_progress", run) as log:
        await_server(run, lambda text: log.write(Notice(text)))
        name, last = source_name(run.data.train), last_prompts(run)
        if MERGED.search(run.data.train) is None or last is None or name > last:
            save_prompts(run, name)


def source_name(source: str) -> str:
    """The name by which a source of prompts is recorded: the last of its merged files, else the source itself."""
    found = MERGED.search(source)
    return found["last"] if found else source


def new_prompts(config: RunConfig, prompts: str, last: str | None) -> str | None:
    """The new prompts as one source, or None.

    Args:
        config: names the store, and the folder for merged files of this machine.
        prompts: see `prepare_continual`.
        last: name of the last file that was used.

    Raises:
        DataError: the folder has no file of prompts.
        ConfigError: the folder does not exist on this machine.
    """
    if prompts.startswith("s3://") and prompts.endswith("/"):
        bucket, prefix = parse_uri(prompts)
        with open_store(config.store.model_copy(update={"bucket": bucket}), config.output) as store:
            names = names_after(last, [item.key.removeprefix(prefix) for item in store.list(prefix)], prompts)
            data = merged(store.get_bytes(prefix + name) for name in names)
        if not names:
            return None
        with open_store(config.store, config.output) as store:
            return store.uri(store.put_bytes(merged_key(data, names[-1]), data).key)
    folder = Path(prompts)
    if folder.is_dir():
        names = names_after(last, [str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")], prompts)
        if not names:
            return None
        data = merged((folder / name).read_bytes() for name in names)
        path = config.output.resolve() / merged_key(data, names[-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)
    if "://" not in prompts and not folder.is_file():
        fix = f"There is no {folder.absolute()}."
        raise ConfigError("prompts", prompts, f"a folder of {SUFFIX} files, or a value of data.train", fix)
    return prompts


def names_after(last: str | None, names: list[str], folder: str) -> list[str]:
    """The sorted names of prompt files after the last used one.

    Raises:
        DataError: there is no prompt file at all.
    """
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if not files:
        raise DataError(f"{folder} has no {SUFFIX} file; put prompts there, under names that sort by date")
    return [name for name in files if last is None or name > last]


def merged(parts: Iterable[bytes]) -> bytes:
    return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts)


def merged_key(data: bytes, last: str) -> str:
    """Where merged prompts are written, by their digest and the name of their last file; see `MERGED`."""
    return f"inputs/{hashlib.sha256(data).hexdigest()}/{last}"
