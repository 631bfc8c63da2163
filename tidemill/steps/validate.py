"""The step `validate`: everything that is checked before a run uses any GPU.

Every `check_*` raises a TidemillError that names the setting, its value, what is allowed and what to do.
"""

from __future__ import annotations

import inspect
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rich.console import Console

from tidemill.config.data import DataConfig, RewardConfig
from tidemill.config.run import RunConfig
from tidemill.driver.resume import check_fit
from tidemill.errors import ConfigError, DataError
from tidemill.models.hf_config import context_of, heads_of, refuse_untrainable, vocab_size_of
from tidemill.models.locate import Locator, pin_model
from tidemill.observe.markdown import links
from tidemill.rollout.prompts import TOO_LONG, PromptSet, UnusablePromptError, as_text, load_tokenizer, take
from tidemill.rollout.rewards import first_number, resolve
from tidemill.rollout.sources import Row, Rows, load_rows
from tidemill.steps.provider import provider_of
from tidemill.steps.refusal import explained
from tidemill.steps.request import Request, settings_key
from tidemill.steps.run_folder import CONFIG_FILE, step, write_settings
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.object_store import ObjectStore, credentials
from tidemill.store.seaweedfs import find_binary
from tidemill.store.server import open_store, store_folder
from tidemill.tracking.mlflow_server import access_problem, experiment_of

NEED_ANSWERS = ("exact_number", "math_verify")
FOREIGN_PARAMETERS = {"completions": "TRL", "solution_str": "verl"}
FOREIGN_FIX = "call it from a function of your own, as docs/from_verl.md shows."
NEED_ENTRIES = "reasoning_gym"
PORTS = {"http": 80, "https": 443}
PROBE_TIMEOUT_S = 5.0
BATCH = 1000  # prompts that are tokenised at once
REPORT_S = 10.0
NAMED = 3  # prompts that a message names
MAX_SETTINGS = 32 << 10
"""Bytes of the settings as YAML, which are an argument of every step."""


Say = Callable[[str], None]


def print_line(text: str) -> None:
    """Write a line to the log of the step."""
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


@explained()
def validate(request: Request, page: str) -> str:
    """Refuse a run that cannot succeed, and write the page of links.

    Args:
        request: the parameters of the pipeline.
        page: file for the links to follow the run.

    Returns:
        The settings with every default, as YAML; see `validate_run`.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    config = request.settings()
    Path(page).write_text(links(config, request.kfp_run), encoding="utf-8")
    checked = validate_run(config)
    Path(page).write_text(links(config, request.kfp_run, experiment_of(config)), encoding="utf-8")
    return checked.to_yaml()


def validate_run(config: RunConfig) -> RunConfig:
    """Refuse a run that cannot succeed: settings, prompts, rewards, model, store, provider and checkpoints.

    If nothing is wrong, the settings replace those of an earlier attempt in the run's folder and in a shared store.

    Returns:
        The settings, with a registry alias replaced by the version that it names.
    """
    with step("validate", config):
        pinned = check_run(config)
        check_restart(pinned)
        if (config.folder / CONFIG_FILE).is_file():  # a pod keeps none
            write_settings(config)
        if config.store.endpoint != "embedded":
            with open_store(config.store, config.output) as store:
                store.put_bytes(settings_key(config.name), pinned.to_yaml().encode())
    return pinned


def check_run(config: RunConfig) -> RunConfig:
    """Refuse settings that cannot succeed under any run name, as `tidemill check` does.

    Returns:
        The settings, with a registry alias replaced by the version that it names.
    """
    check_length(config)
    check_output(config)
    inputs = check_inputs(config)
    check_tracking(config.tracking.uri)
    check_store(config)
    provider_of(config).check()
    check_model(config, inputs, trains=True)  # last, because it takes minutes for a million prompts
    return pin_model(config)


def check_length(config: RunConfig) -> None:
    """Refuse settings that are too long for an argument of a step; see `training.excerpt`."""
    length = len(config.to_yaml().encode())
    if length > MAX_SETTINGS:
        fix = "Move long texts into files: prompts into data.train, a template into the model's tokenizer."
        raise ConfigError("config", f"{length} bytes", f"at most {MAX_SETTINGS} with every default", fix)


def check_inputs(config: RunConfig) -> dict[str, Rows]:
    """Check that the prompts can be read and suffice, and that each reward function accepts its arguments and answers.

    Returns:
        The rows of each source, by its setting.

    Raises:
        ConfigError, DataError, RewardError: naming the setting, the file and line, or the function.
    """
    sources = {"data.train": config.data.train, "data.held_out": config.data.held_out}
    named = {key: source for key, source in sources.items() if source is not None}
    rows = {key: load_rows(source, config.data, key, Locator.of(config).fetch_file) for key, source in named.items()}
    check_prompt_count(config, len(rows["data.train"]))
    check_system_prompt(config.data, chain.from_iterable(rows.values()))
    for place, reward in enumerate(config.rewards):
        check_reward(reward, f"rewards.{place}")
        for key, found in rows.items():
            if reward.function in NEED_ANSWERS:
                check_answers(found, config.data.answer_key, f"{key} = {sources[key]}", reward.function)
            if reward.function == NEED_ENTRIES and not all("entry" in row for row in found):
                fix = "Use data of reasoning_gym://TASK, or another reward."
                raise DataError(
                    f"{key} = {sources[key]}: a row has no column 'entry', which the reward {NEED_ENTRIES} needs. {fix}"
                )
    return rows


def check_prompt_count(config: RunConfig, rows: int) -> None:
    """Refuse too few prompts for one optimizer step."""
    epochs, needed = config.data.epochs, config.required_samples
    if epochs is not None and epochs * rows < needed:
        allowed = f"enough passes over {rows} prompts for one optimizer step of {needed} groups"
        fix = "Raise it, remove it, or lower trainer.ppo_mini_batch_size."
        raise ConfigError("data.epochs", epochs, allowed, fix)


def check_system_prompt(data: DataConfig, rows: Iterable[Row]) -> None:
    """Refuse a system prompt if every prompt is a list of messages, to which none is added."""
    if data.system_prompt is not None and not any(isinstance(row[data.prompt_key], str) for row in rows):
        allowed = f"null if every {data.prompt_key!r} is a list of messages"
        fix = "Put the system message into the data, or remove this setting."
        raise ConfigError("data.system_prompt", data.system_prompt, allowed, fix)


def check_reward(reward: RewardConfig, key: str) -> None:
    """Refuse a reward function whose signature does not accept the arguments of a call.

    Args:
        reward: the function and its options.
        key: key of the reward in the settings.

    Raises:
        RewardError: the function cannot be found.
        ConfigError: it is async, lacks a required argument, or does not accept its options.
    """
    function = resolve(reward.function)
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        fix = "Make it a plain function; it may block, because every call runs in a process of its own."
        raise ConfigError(f"{key}.function", reward.function, "a function that is not async", fix)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # compiled code may have no signature
    for name, library in FOREIGN_PARAMETERS.items():
        if name in signature.parameters and name not in reward.arguments:
            allowed = "a function of (response, *, prompt, answer, extra) that scores one response"
            fix = f"Its parameter {name!r} is that of a reward of {library}: {FOREIGN_FIX}"
            raise ConfigError(f"{key}.function", reward.function, allowed, fix)
    try:
        signature.bind_partial("", prompt="", answer=None, extra={})
    except TypeError as error:
        allowed = "a function of (response, *, prompt, answer, extra) and of its options"
        raise ConfigError(f"{key}.function", reward.function, allowed, f"The call fails: {error}.") from error
    try:
        signature.bind("", prompt="", answer=None, extra={}, **reward.arguments)
    except TypeError as error:
        allowed = f"the keyword arguments of {reward.function} besides prompt, answer and extra"
        raise ConfigError(f"{key}.options", reward.options, allowed, f"The call fails: {error}.") from error
    if reward.function == "overlong":
        check_overlong(reward.arguments, f"{key}.options")


def check_overlong(options: Mapping[str, Any], key: str) -> None:
    """Refuse options with which `overlong` fails or rewards length."""
    budget, buffer, penalty = options["budget"], options["buffer"], options.get("penalty", 1.0)
    counts = all(isinstance(count, int) and not isinstance(count, bool) for count in (budget, buffer))
    number = isinstance(penalty, int | float) and not isinstance(penalty, bool) and 0 < penalty < math.inf
    if not (counts and number and 0 < buffer <= budget):
        allowed = "budget and buffer in tokens, 0 < buffer <= budget, and a number above 0 as penalty"
        raise ConfigError(key, dict(options), allowed, "See docs/configuration.md.")


def check_answers(rows: Rows, answer_key: str, source: str, function: str) -> None:
    """Refuse rows that a reward function cannot score.

    Raises:
        DataError: naming the first row without an answer or, if needed, without a number as answer.
    """
    for place, row in zip(rows.places, rows, strict=True):
        answer = as_text(take(dict(row), answer_key))
        if answer is None or not answer.strip():
            raise DataError(
                f"{source}: {place} has no answer in {answer_key!r}, which the reward {function} needs; it has "
                f"{sorted(row)}. Set data.answer_key to one of them, or use another reward."
            )
        if function == "exact_number" and first_number(answer) is None:
            raise DataError(
                f"{source}: {place} has the answer {answer!r}, which is not a number, but the reward {function} "
                "compares numbers. Fix the data, or use another reward, such as math_verify."
            )


def check_model(config: RunConfig, inputs: Mapping[str, Rows], *, trains: bool, say: Say = print_line) -> None:
    """Check a model by its configuration and its tokenizer, which are fetched if they are elsewhere.

    Args:
        config: of the run.
        inputs: as `check_inputs` returns them; each prompt is rendered.
        trains: whether the run trains the model.
        say: gets what is worth knowing about the prompts, and the progress.

    Raises:
        ModelError: the model does not exist, is no model or cannot be trained.
        ConfigError: the longest prompt and response exceed the context, or the GPUs do not divide the attention heads.
        DataError: a prompt cannot be rendered as tokens of the model.
    """
    tried: list[str] = []
    with TemporaryDirectory(prefix="tidemill-model-") as scratch:
        folder = Locator.of(config).fetch_settings(config.model, Path(scratch), tried)
        if folder is None:
            attempts = "; ".join(tried)
            say(f"the model and the tokens of the prompts are not checked: {config.model} was not found in {attempts}")
            return
        if trains:
            refuse_untrainable(folder)
        check_heads(config, heads_of(folder))
        wanted = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        context = context_of(folder)
        if context is not None and wanted > context:
            allowed = f"at most the {context} tokens of context of {config.model}"
            raise ConfigError(
                "data.max_prompt_tokens + rollout.max_new_tokens", wanted, allowed, "Lower one of the two."
            )
        tokenizer, vocab_size = load_tokenizer(folder), vocab_size_of(folder)
        for key, rows in inputs.items():
            prompts = PromptSet(rows, tokenizer, config.data, config.seed, vocab_size)
            usable = check_prompts(prompts, key, config.data, say)
            if key == "data.train":
                check_prompt_count(config, usable)


def check_prompts(prompts: PromptSet, key: str, data: DataConfig, say: Say, report_s: float = REPORT_S) -> int:
    """Render every prompt of a source as tokens, and say how long they are.

    Args:
        prompts: of the source.
        key: the setting that names it.
        data: the settings of the data.
        say: gets a line about the lengths, and lines about the progress.
        report_s: seconds between two lines about the progress.

    Returns:
        Number of prompts that are not too long.

    Raises:
        DataError: a prompt cannot be rendered, or all are too long.
    """
    lengths: list[int] = []
    largest, refused, reported = 0, list[str](), time.monotonic()
    for start in range(0, len(prompts), BATCH):
        for ids in prompts.token_ids(range(start, min(start + BATCH, len(prompts)))):
            if isinstance(ids, UnusablePromptError):
                refused.append(str(ids))
            else:
                lengths.append(len(ids))
                largest = max(largest, int(ids.max(initial=0)))
        if time.monotonic() - reported >= report_s:
            reported = time.monotonic()
            say(f"{key}: {len(lengths) + len(refused)} of {len(prompts)} prompts are rendered")
    if refused:
        first = "\n  ".join(refused[:NAMED])
        raise DataError(
            f"{key}: {len(refused)} of {len(prompts)} prompts cannot be rendered; fix or remove them:\n  {first}"
        )
    too_long = sum(length > data.max_prompt_tokens for length in lengths)
    rows = prompts.vocab_size or "unknown"
    counts = f"{len(prompts)} prompts of up to {max(lengths)} tokens, {too_long} {TOO_LONG} {data.max_prompt_tokens}"
    say(f"{key}: {counts}; the largest token id is {largest} in an embedding of {rows} rows")
    if too_long == len(prompts):
        raise DataError(f"{key}: all {counts}. Raise data.max_prompt_tokens.")
    return len(prompts) - too_long


def check_heads(config: RunConfig, heads: int | None) -> None:
    """Refuse a tensor parallel size that does not divide the attention heads."""
    size = config.rollout.tensor_parallel_size
    if heads is not None and heads % size:
        allowed = f"a divisor of the {heads} attention heads of {config.model}"
        raise ConfigError(
            "rollout.tensor_parallel_size", size, allowed, "Every GPU of an engine has the same number of heads."
        )


def check_store(config: RunConfig) -> None:
    """Check that the embedded server is installed, or that the configured store accepts a write and a delete.

    Raises:
        StoreError, ConfigError: naming the endpoint, the missing program or the missing credential.
    """
    if config.store.endpoint == "embedded":
        find_binary()
    else:
        store = ObjectStore.connect(config.store.endpoint, config.store.bucket, *credentials())
        probe = f"runs/{config.name}/probe"
        store.put_bytes(probe, b"")
        store.delete(probe)


def check_output(config: RunConfig) -> None:
    """Check that the output folder exists or can be made, and can be written to."""
    path = config.output.resolve()
    found = next(place for place in (path, *path.parents) if place.exists())
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        allowed = f"a folder that can be made and written to, but {found} cannot"
        raise ConfigError("output", str(path), allowed, "Set another folder.")


def check_tracking(uri: str | None) -> None:
    """Check that the MLflow server answers and accepts our credentials.

    Raises:
        ConfigError: it does not.
    """
    parts = urlsplit(uri or "")
    if parts.scheme not in PORTS:
        return
    host = parts.hostname or ""
    if parts.scheme not in getproxies() or proxy_bypass(host):  # MLflow connects through the proxy
        try:
            socket.create_connection((host, parts.port or PORTS[parts.scheme]), timeout=PROBE_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            fix = f"{error}. Start it, fix the address, or, for a run on this machine, remove the setting."
            raise ConfigError("tracking.uri", uri, "an MLflow server that answers", fix) from error
    if (problem := access_problem(str(uri))) is not None:
        fix = (
            f"{problem}. Fix the address, or set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; pods get them "
            "from the secret tidemill-mlflow-login."
        )
        raise ConfigError("tracking.uri", uri, "an MLflow server that accepts our credentials", fix)


def check_restart(config: RunConfig) -> None:
    """Refuse to resume a run whose checkpoints do not fit the settings, or which must not resume.

    Raises:
        ConfigError: checkpoints exist, and `checkpoint.resume` is `never` or they were made with other settings.
        CheckpointError: checkpoints exist and none is intact.
        StoreError: the store cannot be reached.
    """
    if config.store.endpoint == "embedded" and not store_folder(config.output).is_dir():
        return  # no server has been started, so nothing is stored
    with open_checkpoints(config) as checkpoints:
        check_fit(config, checkpoints)
