"""What is checked before anything is paid for: prompts, rewards, and room on this machine."""

from __future__ import annotations

import inspect
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import psutil
from safetensors import safe_open

from tidemill.config.data import DataConfig, RewardConfig
from tidemill.config.run import RunConfig
from tidemill.driver.restart import check_fit
from tidemill.errors import ConfigError, DataError, RunError
from tidemill.models.locate import (
    Locator,
    context_of,
    default_cache,
    find_model,
    heads_of,
    looks_like_hub_name,
    snapshot,
)
from tidemill.models.smollm2 import SMOLLM2
from tidemill.rollout.prompts import as_text, take
from tidemill.rollout.rewards import first_number, resolve
from tidemill.rollout.sources import Row, load_rows
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.object_store import ObjectStore, credentials
from tidemill.store.seaweedfs import find_binary
from tidemill.store.server import store_folder
from tidemill.tracking.mlflow_server import access_problem

GIB = 2**30
NEED_ANSWERS = ("exact_number", "math_verify")
NEED_ENTRIES = "reasoning_gym"
PORTS = {"http": 80, "https": 443}
PROBE_TIMEOUT_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
RAY_OBJECT_STORE = GIB // 2
PROCESS = 3 * GIB // 2  # what a process with torch and vLLM imported takes before it holds a model
TRAINING_BYTES_PER_WEIGHT = 16  # fp32 weight, gradient and two moments of AdamW
LOADED_BYTES_PER_WEIGHT = 4  # on every rank, until it has given away what other ranks keep
CHECKPOINT_BYTES_PER_WEIGHT = 12
EXPORTED_BYTES_PER_WEIGHT = 2


def check_inputs(config: RunConfig) -> None:
    """Read every prompt, see that there are enough, and that each reward function can be called and has its answers.

    Raises:
        ConfigError, DataError, RewardError: naming the setting, the file and line, or the function.
    """
    sources = {"data.train": config.data.train, "data.held_out": config.data.held_out}
    named = {key: source for key, source in sources.items() if source is not None}
    rows = {key: load_rows(source, config.data, key, Locator.of(config).fetch_file) for key, source in named.items()}
    check_amount(config, len(rows["data.train"]))
    check_system_prompt(config.data, chain.from_iterable(rows.values()))
    for place, reward in enumerate(config.rewards):
        check_call(reward, f"rewards.{place}")
        for key, found in rows.items():
            source = f"{key} = {sources[key]}"
            if reward.function in NEED_ANSWERS:
                check_answers(found, config.data.answer_key, source, reward.function)
            if reward.function == NEED_ENTRIES and not all("entry" in row for row in found):
                fix = "Take data of reasoning_gym://TASK, or another reward."
                raise DataError(
                    f"{source}: its rows have no column 'entry', which the reward {NEED_ENTRIES} needs. {fix}"
                )


def check_amount(config: RunConfig, rows: int) -> None:
    """Refuse prompts that are used up before one optimizer step has all of its groups.

    Raises:
        ConfigError: naming how many there are and how many a step takes.
    """
    epochs, needed = config.data.epochs, config.required_samples
    if epochs is not None and epochs * rows < needed:
        allowed = f"enough passes over {rows} prompts for one optimizer step of {needed} groups"
        fix = "Raise it, leave it out, or lower trainer.ppo_mini_batch_size."
        raise ConfigError("data.epochs", epochs, allowed, fix)


def check_system_prompt(data: DataConfig, rows: Iterable[Row]) -> None:
    """Refuse a system prompt that no prompt would get, because all bring their own messages.

    Raises:
        ConfigError: naming it.
    """
    if data.system_prompt is not None and not any(isinstance(row[data.prompt_key], str) for row in rows):
        allowed = f"null where every {data.prompt_key!r} is a list of messages"
        fix = "Put the system message into the data, or leave this out."
        raise ConfigError("data.system_prompt", data.system_prompt, allowed, fix)


def check_call(reward: RewardConfig, key: str) -> None:
    """Refuse a reward function that does not take what it will be called with.

    Args:
        reward: the function and its options.
        key: of the reward in the settings.

    Raises:
        RewardError: it cannot be found.
        ConfigError: it is async, lacks an argument of every reward function, or its options are not its arguments.
    """
    function = resolve(reward.function)
    if inspect.iscoroutinefunction(function):
        fix = "Nobody would await it. Every call has a process to itself, so it may block; make it a plain function."
        raise ConfigError(f"{key}.function", reward.function, "a function that is not async", fix)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # compiled code may not say what it takes
    try:
        signature.bind_partial("", prompt="", answer=None, extra={})
    except TypeError as error:
        allowed = "a function of (response, *, prompt, answer, extra) and of its options"
        raise ConfigError(f"{key}.function", reward.function, allowed, f"Called so: {error}.") from error
    try:
        signature.bind("", prompt="", answer=None, extra={}, **reward.options)
    except TypeError as error:
        allowed = f"the keyword arguments of {reward.function} besides prompt, answer and extra"
        raise ConfigError(f"{key}.options", reward.options, allowed, f"Called with them: {error}.") from error
    if reward.function == "overlong":
        check_overlong(reward.options, f"{key}.options")


def check_overlong(options: Mapping[str, Any], key: str) -> None:
    """Refuse numbers that `overlong` cannot reckon with, or would reward length with.

    Raises:
        ConfigError: naming them.
    """
    budget, buffer, penalty = options["budget"], options["buffer"], options.get("penalty", 1.0)
    counts = all(isinstance(count, int) and not isinstance(count, bool) for count in (budget, buffer))
    number = isinstance(penalty, int | float) and not isinstance(penalty, bool) and 0 < penalty < math.inf
    if not (counts and number and 0 < buffer <= budget):
        allowed = "budget and buffer in tokens, 0 < buffer <= budget, and a number above 0 as penalty"
        raise ConfigError(key, dict(options), allowed, "See docs/configuration.md.")


def check_answers(rows: Sequence[Row], answer_key: str, source: str, function: str) -> None:
    """Refuse rows that a reward function cannot score.

    Raises:
        DataError: naming the first row without an answer, or without a number as its answer, counted from 1.
    """
    for number, row in enumerate(rows, start=1):
        answer = as_text(take(dict(row), answer_key))
        if answer is None or not answer.strip():
            raise DataError(
                f"{source}: row {number} has no answer in {answer_key!r}, which the reward {function} needs; it has "
                f"{sorted(row)}. Set data.answer_key to the right one, or take another reward."
            )
        if function == "exact_number" and first_number(answer) is None:
            raise DataError(
                f"{source}: row {number} has the answer {answer!r}, which is not a number, and the reward {function} "
                "compares numbers. Mend the data, or take another reward, such as math_verify."
            )


def check_model(config: RunConfig) -> None:
    """Look at a model that is on this machine; one that lies elsewhere is brought here by `provision`.

    Raises:
        ModelError: there is no such folder, or it is no model.
        ConfigError: the longest prompt and response do not fit its context, or its heads cannot be shared out.
    """
    remote = config.model.startswith(("s3://", "models:/")) or looks_like_hub_name(config.model)
    if not remote or Path(config.model).expanduser().is_dir():
        folder: Path | None = find_model(config.model, default_cache()).path
    else:
        folder = present(config.model)
    if folder is None:
        return
    check_heads(config, heads_of(folder))
    wanted = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    context = context_of(folder)
    if context is not None and wanted > context:
        allowed = f"at most the {context} tokens of context of {config.model}"
        raise ConfigError("data.max_prompt_tokens + rollout.max_new_tokens", wanted, allowed, "Lower one of the two.")


def check_heads(config: RunConfig, heads: int | None) -> None:
    """Refuse a number of GPUs that an engine cannot give equally many attention heads each.

    Raises:
        ConfigError: naming both numbers.
    """
    size = config.rollout.tensor_parallel_size
    if heads is not None and heads % size:
        allowed = f"a divisor of the {heads} attention heads of {config.model}"
        raise ConfigError("rollout.tensor_parallel_size", size, allowed, "Every GPU of an engine keeps equally many.")


def present(name: str) -> Path | None:
    """The folder of a published model that was brought or converted earlier, without a look at the network."""
    if not looks_like_hub_name(name):
        return None
    converted = default_cache() / "models" / name.partition("/")[2] if name == SMOLLM2 else None
    if converted is not None and converted.is_dir():
        return converted
    return snapshot(name, True, "Hugging Face cache", [])


def count_weights(folder: Path) -> int:
    """Parameters in the safetensors files of a model."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return total


def check_store(config: RunConfig) -> None:
    """See that the embedded server can be started, or that the configured one answers and lets us write and delete.

    Raises:
        StoreError, ConfigError: naming the endpoint, the program or the missing key.
    """
    if config.store.endpoint == "embedded":
        find_binary()
    else:
        store = ObjectStore.connect(config.store.endpoint, config.store.bucket, *credentials())
        probe = f"runs/{config.name}/probe"
        store.put_bytes(probe, b"")
        store.delete(probe)


def check_output(config: RunConfig) -> None:
    """See that the folder of runs is one, or can be made.

    Raises:
        ConfigError: something else has its name, or we may not write there.
    """
    path = config.output.resolve()
    found = next(place for place in (path, *path.parents) if place.exists())
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        allowed = f"a folder that can be made and written to, and {found} is none"
        raise ConfigError("output", str(path), allowed, "Name another folder.")


def check_cluster(config: RunConfig) -> None:
    """Refuse to join a Ray that nobody named.

    Raises:
        ConfigError: RAY_ADDRESS is not set.
    """
    if config.cluster.provider == "existing" and not os.environ.get("RAY_ADDRESS"):
        allowed = "existing with RAY_ADDRESS set"
        raise ConfigError("cluster.provider", "existing", allowed, "Set RAY_ADDRESS, or choose local.")


def check_tracking(uri: str | None) -> None:
    """See that something listens at the address of an MLflow server, and that it knows our account.

    Raises:
        ConfigError: nothing does, or it does not.
    """
    parts = urlsplit(uri or "")
    if parts.scheme not in PORTS:
        return
    host = parts.hostname or ""
    if parts.scheme not in getproxies() or proxy_bypass(host):  # of one behind a proxy only MLflow knows the way
        try:
            socket.create_connection((host, parts.port or PORTS[parts.scheme]), timeout=PROBE_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            fix = f"{error}. Start it, mend the address, or, for a run on this machine, leave the setting out."
            raise ConfigError("tracking.uri", uri, "an MLflow that answers", fix) from error
    if (said := access_problem(str(uri))) is not None:
        fix = (
            f"{said}. Mend the address, or set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; pods have them "
            "from the secret tidemill-mlflow-login."
        )
        raise ConfigError("tracking.uri", uri, "an MLflow that lets us in", fix)


def check_restart(config: RunConfig) -> None:
    """Refuse to go on with a run that has checkpoints, where the settings say so, or do not fit them.

    Raises:
        ConfigError: there are some, and `checkpoint.resume` is `never` or they were made with other settings.
        CheckpointError: there are some and none is intact.
        StoreError: the store cannot be reached.
    """
    if config.store.endpoint == "embedded" and not store_folder(config.output).is_dir():
        return  # and no server is started to see that
    with open_checkpoints(config) as checkpoints:
        check_fit(config, checkpoints)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one kind of storage that a run needs, and that are there."""

    what: str
    needed: int
    free: int
    fix: str


def check_room(config: RunConfig, weights: int) -> None:
    """Refuse to start without the memory and the disk for a model of so many weights.

    Args:
        config: of the run.
        weights: parameters of the model; 0 checks only what any run needs.

    Raises:
        RunError: naming what is needed, what is there and what to do.
    """
    for room in rooms(config, weights):
        if room.free < room.needed:
            raise RunError(
                f"not enough {room.what}: about {room.needed / GIB:.1f} GiB are needed and {room.free / GIB:.1f} GiB "
                f"are free. {room.fix}"
            )


def rooms(config: RunConfig, weights: int) -> Iterator[Room]:
    """Estimates, on the low side, of what a run on this machine takes."""
    output = nearest_folder(config.output)
    checkpoints = (config.checkpoint.keep + 2) * CHECKPOINT_BYTES_PER_WEIGHT * weights
    # Two snapshots in the store; and in memory the trainer's newest export beside the engines' old and new one.
    snapshots, copies = (2, 3) if config.sync.transport == "object_store" else (0, 2)
    yield Room(
        f"disk below {config.output}",
        GIB + checkpoints + (3 + snapshots) * EXPORTED_BYTES_PER_WEIGHT * weights,
        shutil.disk_usage(output).free,
        "Free some, name another folder with output=..., or keep fewer checkpoints (checkpoint.keep).",
    )
    if config.cluster.provider != "local":
        return
    training = max(TRAINING_BYTES_PER_WEIGHT, config.trainer.ranks * LOADED_BYTES_PER_WEIGHT) * weights
    engine = PROCESS + config.rollout.cpu_kv_cache_gib * GIB + EXPORTED_BYTES_PER_WEIGHT * weights
    yield Room(
        "memory",
        config.trainer.ranks * PROCESS + training + config.rollout.engines * engine,
        psutil.virtual_memory().available,
        f"Close other programs, choose a smaller model, or lower what each takes some of: {memory_settings(config)}.",
    )
    if SHARED_MEMORY.is_dir():
        yield Room(
            f"shared memory in {SHARED_MEMORY}",
            RAY_OBJECT_STORE + copies * EXPORTED_BYTES_PER_WEIGHT * weights,
            shutil.disk_usage(SHARED_MEMORY).free,
            "In a container start it with a larger one, for example --shm-size=4g.",
        )


def memory_settings(config: RunConfig) -> str:
    """The settings by which a run takes more memory, with their values."""
    engines, cache = config.rollout.engines, config.rollout.cpu_kv_cache_gib
    ranks = config.trainer.ranks
    return f"rollout.engines = {engines}, rollout.cpu_kv_cache_gib = {cache} for each, trainer.ranks = {ranks}"


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
