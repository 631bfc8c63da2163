"""The parameters of a pipeline: the settings of a run, and those settings that are fields of KFP's form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from tidemill.config.names import TIDEMILL
from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.config.section import DNS_LABEL
from tidemill.errors import ConfigError, StoreError, StoreMissingError
from tidemill.store.object_store import ObjectStore, credentials, parse_uri

ENDPOINT = "store.endpoint"
RUN_ID_LENGTH = 8
"""Characters of a KFP run's id in the name of a run."""
RUN_ID = re.compile(rf"-[0-9a-f]{{{RUN_ID_LENGTH}}}(-v\d+)?$")
"""The end of the name of an earlier run of KFP."""
FIRST_RUN: Mapping[str, Any] = {
    "name": "post-training",
    "output": "/tmp/tidemill",
    "rollout": {"max_new_tokens": 512},
    "sync": {"transport": "object_store"},
    "store": {"endpoint": "http://store.tidemill.svc:9000"},
    "tracking": {"uri": "http://mlflow.tidemill.svc:5000"},
    "cluster": {"provider": "kuberay"},
}
"""What a run without a run file has besides the fields of the form, in a cluster of `k8s/`."""
DEFAULTS: Mapping[str, str] = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "data_held_out": "reasoning_gym://chain_sum?seed=2&size=100",
    "reward": "reasoning_gym",
    "trainer_steps": "100",
    "rollout_group_size": "8",
    "trainer_learning_rate": "1e-6",
    "rollout_engines": "1",
    "trainer_ranks": "1",
    "kubernetes_gpu_type": "",
    "kubernetes_gpu_hours": "8",
    "kubernetes_image": "",
    "data_train": "reasoning_gym://chain_sum?seed=1&size=2000",
}
"""The fields of the form and their values in a new form; those of `pipelines/form.py`."""
NUMBERS = ("steps", "size", "rate", "engines", "ranks", "hours")
"""The last word of a field that holds a number."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of all pipelines.

    The fields after `kfp_run` are settings of the form, as text. A field that is empty or has its default leaves the
    setting as it is in `config`; any other value overrides everything else.

    Attributes:
        config: "" for `FIRST_RUN`; settings as YAML or JSON text; `s3://BUCKET/KEY` of such a file; its path on this
            machine; or the name of an earlier run, whose settings are copied.
        overrides: `KEY.PATH=VALUE`, see `entries`.
        run_name: name of the run; an existing run is resumed. "" makes a new name from the settings' name and
            `kfp_run`.
        kfp_run: id of the KFP run.
        reward: the only reward function. The other fields are named after their setting.
    """

    config: str = ""
    overrides: str = ""
    run_name: str = ""
    kfp_run: str = ""
    model: str = ""
    data_held_out: str = ""
    reward: str = ""
    trainer_steps: str = ""
    rollout_group_size: str = ""
    trainer_learning_rate: str = ""
    rollout_engines: str = ""
    trainer_ranks: str = ""
    kubernetes_gpu_type: str = ""
    kubernetes_gpu_hours: str = ""
    kubernetes_image: str = ""
    data_train: str = ""

    def settings(self, more: Sequence[str] = ()) -> RunConfig:
        """The settings of the run, with the name of the run; all runs of a config share its registered model.

        Args:
            more: further overrides.

        Raises:
            ConfigError: the settings or the name are invalid.
            StoreError: settings in the store cannot be read.
        """
        config = self.read([*entries("overrides", self.overrides), *more, *self.fields()])
        name = self.run_name or (f"{config.name}-{short_id(self.kfp_run)}" if self.kfp_run else config.name)
        return config if name == config.name else renamed(config, name)

    def fields(self) -> list[str]:
        """The fields of the form that were filled in, as overrides."""
        given = asdict(self)
        changed = {name: given[name].strip() for name in DEFAULTS}
        return [override(name, value) for name, value in changed.items() if value not in ("", DEFAULTS[name])]

    def read(self, overrides: list[str]) -> RunConfig:
        """The settings with the name in the config."""
        source = self.config.strip()
        if not source:
            return parse_config(yaml.safe_dump(dict(FIRST_RUN)), [*self.first_fields(), *overrides])
        if "\n" not in source:
            if source.startswith("s3://"):
                return parse_config(as_yaml(stored_text(source, overrides)), overrides)
            if source.endswith((".yaml", ".yml")):
                return load_config(source, overrides)
            if re.fullmatch(DNS_LABEL, source):
                return copied(source, overrides)
            check_one_line(source)
        return parse_config(as_yaml(self.config), overrides)

    def first_fields(self) -> Iterator[str]:
        """The defaults of the form as overrides; its held-out prompts belong to its own prompts."""
        own = self.data_train.strip() in ("", DEFAULTS["data_train"])
        for name, value in DEFAULTS.items():
            if value and (own or name != "data_held_out"):
                yield override(name, value)


def override(name: str, value: str) -> str:
    """A field of the form as an override."""
    if name == "reward":
        return f"rewards={json.dumps([{'function': value}])}"
    is_number = name.rpartition("_")[2] in NUMBERS
    return f"{name.replace('_', '.', 1)}={value if is_number else yaml_text(value)}"


def entries(name: str, text: str) -> list[str]:
    """The entries of a field: one a line, or `[ENTRY, ENTRY]` as in YAML, because KFP's form drops line breaks.

    Empty lines and lines that start with # are ignored.

    Args:
        name: of the field, for the error.
        text: of the field.

    Raises:
        ConfigError: it starts with [ and is not a list of strings.
    """
    if not text.lstrip().startswith("["):
        lines = (line.strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        fix = 'Quote an entry that has a comma, a bracket or a brace: ["KEY=[1, 2]", KEY=VALUE].'
        raise ConfigError(name, text, "one entry a line, or [ENTRY, ENTRY]", fix)
    return [entry.strip() for entry in found]


def check_one_line(text: str) -> None:
    """Refuse a run file that lost its line breaks in KFP's form.

    Raises:
        ConfigError: the line is not a mapping.
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        allowed = "valid YAML with its line breaks, JSON in one line, or s3://BUCKET/KEY"
        fix = "KFP's form drops line breaks; docs/kfp.md says how to write a run file in one line."
        raise ConfigError("config", text[:40], allowed, fix)


def as_yaml(text: str) -> str:
    """A JSON object as YAML, which reads the number 1e-06 as text; other text is unchanged.

    Keys that are given twice are left for the YAML reader to refuse.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is given twice")
        return found

    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except ValueError:
        return text
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def yaml_text(value: str) -> str:
    """A string as one YAML value."""
    return yaml.safe_dump(value, default_style='"', width=10**6).strip()


def settings_key(run: str) -> str:
    """Key in the store of the settings of a run."""
    return f"runs/{run}/config.yaml"


def copied(run: str, overrides: Sequence[str]) -> RunConfig:
    """The settings of an earlier run in the store of the overrides or of `FIRST_RUN`, without the run's id.

    Raises:
        ConfigError: there is no such run.
        StoreError: the store cannot be read.
    """
    bucket = override_of("store.bucket", overrides) or TIDEMILL
    try:
        text = stored_text(f"s3://{bucket}/{settings_key(run)}", overrides)
    except StoreMissingError as error:
        allowed = "empty, settings, s3://BUCKET/KEY, or the name of an earlier run on Kubernetes"
        raise ConfigError("config", run, allowed, f"The store has no settings of that run: {error}.") from error
    return parse_config(text, [f"name={yaml_text(RUN_ID.sub('', run))}", *overrides])


def override_of(key: str, overrides: Sequence[str]) -> str | None:
    """The last value of a setting in the overrides; None without one."""
    values = [value for name, _, value in (line.partition("=") for line in overrides) if name == key]
    return values[-1] if values else None


def stored_text(uri: str, overrides: Sequence[str]) -> str:
    """A file of settings in the store of the overrides or of `FIRST_RUN`.

    Raises:
        ConfigError: the file is not UTF-8.
        StoreError: the file cannot be read.
    """
    endpoint = override_of(ENDPOINT, overrides) or FIRST_RUN["store"]["endpoint"]
    bucket, key = parse_uri(uri)
    try:
        data = ObjectStore.connect(endpoint, bucket, *credentials()).get_bytes(key)
    except StoreMissingError:
        raise
    except StoreError as error:
        hint = f"Another store is named in the overrides: {ENDPOINT}=http://HOST:PORT"
        raise type(error)(f"config = {uri}: {error}. {hint}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("config", uri, "a text file in UTF-8", f"{error}.") from error


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The settings with another name and the same registered model.

    Raises:
        ConfigError: the name is invalid or too long.
    """
    tree = config.model_dump(mode="json") | {"name": name}
    tree["registry"]["model"] = config.registered_model
    return parse_config(yaml.safe_dump(tree))


def short_id(kfp_run: str) -> str:
    """The part of a KFP run's id in the name of its run."""
    return "".join(letter for letter in kfp_run.lower() if letter.isalnum())[:RUN_ID_LENGTH]
