"""What a person asks of a pipeline: the settings of a run, and the few of them that are fields of KFP's form.

KFP has no fields that may stay empty, so "" and 0 say that the settings decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.store.object_store import ObjectStore, credentials, parse_uri

MARK = 8
"""Characters of a KFP run's id in the name of a run."""
ENDPOINT = "store.endpoint"


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters that all pipelines have; "" and 0 leave a thing as the settings say.

    Attributes:
        config: settings as YAML text, `s3://BUCKET/KEY` of such a file, or its path on this machine; a text of one line
            is YAML or JSON too.
        overrides: `KEY.PATH=VALUE`, see `entries`.
        run_name: name of the run; one that exists is resumed. "" makes a new one from the settings' name and `kfp_run`.
        kfp_run: id of the KFP run.
        gpu_type, engines, ranks, image, gpu_hours: `kubernetes.gpu_type`, `rollout.engines`, `trainer.ranks`,
            `kubernetes.image` and `kubernetes.gpu_hours`, before everything else.
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
        """The settings of the run, under the run's own name.

        Args:
            more: overrides besides those that are asked for.

        Raises:
            ConfigError: something in them is wrong.
            StoreError: they lie in the store and cannot be read.
        """
        return named(self.read([*self.lines(), *more, *self.fields()]), self.run_name, self.kfp_run)

    def lines(self) -> list[str]:
        """The overrides that are written out."""
        return entries("overrides", self.overrides)

    def fields(self) -> Iterator[str]:
        """The fields of the form that are filled in, as overrides. KFP sends whole numbers as floats."""
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
        """The settings under the name that they have themselves."""
        source = self.config.strip()
        if source.startswith("s3://") and "\n" not in source:
            return parse_config(stored_text(source, overrides), overrides)
        if source.endswith((".yaml", ".yml")) and "\n" not in source:
            return load_config(source, overrides)
        if "\n" not in source:
            refuse_lost_lines(source)
        return parse_config(self.config, overrides)


def entries(name: str, text: str) -> list[str]:
    """What a field of several entries says: one a line, or `[ENTRY, ENTRY]` as in YAML, because KFP's form has fields
    of one line only and drops line breaks. Empty lines and those that begin with # say nothing.

    Args:
        name: of the field.
        text: what a person wrote.

    Raises:
        ConfigError: it begins like a list and is none of texts.
    """
    if not text.lstrip().startswith("["):
        lines = (line.strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        fix = 'Put an entry with a comma, a bracket or a brace of its own between quotes: ["KEY=[1, 2]", KEY=VALUE].'
        raise ConfigError(name, text, "one entry a line, or [ENTRY, ENTRY]", fix)
    return [entry.strip() for entry in found]


def refuse_lost_lines(text: str) -> None:
    """Say what became of a run file that was pasted into KFP's form.

    Raises:
        ConfigError: one line that is no mapping.
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
    """A number without a fraction as an integer; another as it is, for the settings to refuse."""
    return int(number) if float(number).is_integer() else number


def yaml_text(value: str) -> str:
    """A text as one YAML value."""
    return yaml.safe_dump(value, default_style='"', width=10**6).strip()


def stored_text(uri: str, overrides: list[str]) -> str:
    """A file of settings in the store, whose address cannot stand in the file itself.

    Raises:
        ConfigError: no override says where the store is, or the file is no text.
        StoreError: it cannot be read.
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
        raise ConfigError("config", uri, "a file of text in UTF-8", f"{error}.") from error


def named(config: RunConfig, run_name: str, kfp_run: str) -> RunConfig:
    """The settings under the run's own name; models of all runs of these settings stand under the settings' name.

    Raises:
        ConfigError: the name becomes too long, or is none.
    """
    name = run_name or (f"{config.name}-{mark(kfp_run)}" if kfp_run else config.name)
    return config if name == config.name else renamed(config, name)


def renamed(config: RunConfig, name: str) -> RunConfig:
    """The settings under another name, registering under the same model as before."""
    tree = config.model_dump(mode="json") | {"name": name}
    tree["registry"]["model"] = config.registered_model
    return parse_config(yaml.safe_dump(tree))


def mark(kfp_run: str) -> str:
    """What of a KFP run's id stands in the name of its run."""
    return "".join(letter for letter in kfp_run.lower() if letter.isalnum())[:MARK]
