"""The parameters of a pipeline: the settings of a run, and the few settings that are fields of KFP's form.

KFP has no optional fields, so "" and 0 leave a setting as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.store.object_store import ObjectStore, credentials, parse_uri

RUN_ID_LENGTH = 8
"""Characters of a KFP run's id in the name of a run."""
ENDPOINT = "store.endpoint"


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of all pipelines; "" and 0 leave a setting as it is.

    Attributes:
        config: settings as YAML text (one line may be JSON), `s3://BUCKET/KEY` of such a file, or its path on this
            machine.
        overrides: `KEY.PATH=VALUE`, see `entries`.
        run_name: name of the run; an existing run is resumed. "" makes a new name from the settings' name and
            `kfp_run`.
        kfp_run: id of the KFP run.
        gpu_type, engines, ranks, image, gpu_hours: `kubernetes.gpu_type`, `rollout.engines`, `trainer.ranks`,
            `kubernetes.image` and `kubernetes.gpu_hours`; they override everything else.
    """

    config: str
    overrides: str = ""
    run_name: str = ""
    kfp_run: str = ""
    gpu_type: str = ""
    engines: int = 0
    ranks: int = 0
    image: str = ""
    gpu_hours: float = 0.0

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

    def fields(self) -> Iterator[str]:
        """The filled fields of the form, as overrides. KFP passes integers as floats."""
        if self.gpu_type:
            yield f"kubernetes.gpu_type={yaml_text(self.gpu_type)}"
        if self.engines:
            yield f"rollout.engines={whole(self.engines)}"
        if self.ranks:
            yield f"trainer.ranks={whole(self.ranks)}"
        if self.image:
            yield f"kubernetes.image={yaml_text(self.image)}"
        if self.gpu_hours:
            yield f"kubernetes.gpu_hours={float(self.gpu_hours)}"

    def read(self, overrides: list[str]) -> RunConfig:
        """The settings with the name in the config."""
        source = self.config.strip()
        if source.startswith("s3://") and "\n" not in source:
            return parse_config(stored_text(source, overrides), overrides)
        if source.endswith((".yaml", ".yml")) and "\n" not in source:
            return load_config(source, overrides)
        if "\n" not in source:
            check_one_line(source)
        return parse_config(self.config, overrides)


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


def whole(number: float) -> float:
    """A whole number as an integer; other numbers are unchanged, and the settings refuse them."""
    return int(number) if float(number).is_integer() else number


def yaml_text(value: str) -> str:
    """A string as one YAML value."""
    return yaml.safe_dump(value, default_style='"', width=10**6).strip()


def stored_text(uri: str, overrides: list[str]) -> str:
    """A file of settings in the store, whose endpoint must be an override.

    Raises:
        ConfigError: no override names the endpoint, or the file is not UTF-8.
        StoreError: the file cannot be read.
    """
    endpoints = [value for key, _, value in (line.partition("=") for line in overrides) if key == ENDPOINT]
    if not endpoints:
        fix = f"Add the line {ENDPOINT}=http://HOST:PORT to the overrides."
        raise ConfigError("config", uri, f"s3:// together with an override of {ENDPOINT}", fix)
    bucket, key = parse_uri(uri)
    data = ObjectStore.connect(endpoints[-1], bucket, *credentials()).get_bytes(key)
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
