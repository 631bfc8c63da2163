"""All pipelines by name: KFP's object, its YAML, and its parameters as a person writes them, `NAME=VALUE`.

Only what needs KFP imports it.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

Pipeline = Literal["post_training", "sweep", "continual"]
PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)


@dataclass(frozen=True)
class Job:
    """What a run or a schedule executes.

    Attributes:
        name: of the run or schedule.
        pipeline: one of `PIPELINES`.
        parameters: of the pipeline, as text.
        experiment: its name.
        create_experiment: whether to create it if it does not exist.
        service_account: of the steps.
    """

    name: str
    pipeline: str
    parameters: Mapping[str, str]
    experiment: str
    create_experiment: bool
    service_account: str


def pipeline_of(name: str) -> Any:
    """One of `PIPELINES`, KFP's object; imported alone, because KFP takes a second to build each of them.

    Raises:
        ValueError: the name is unknown.
    """
    match name:
        case "post_training":
            from tidemill_pipelines.post_training import post_training

            return post_training
        case "sweep":
            from tidemill_pipelines.sweep import sweep

            return sweep
        case "continual":
            from tidemill_pipelines.continual import continual

            return continual
        case _:
            raise ValueError(f"unknown pipeline {name!r}; the pipelines are {', '.join(PIPELINES)}")


def compiled(name: str) -> str:
    """The YAML of a pipeline, as KFP takes it."""
    from kfp import compiler

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline_of(name), package_path=str(path))
        return path.read_text(encoding="utf-8")


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Parameters written as `NAME=VALUE`, by name.

    Raises:
        ValueError: a word has another form.
    """
    split = [word.partition("=") for word in words]
    if wrong := [word for word, (name, equals, _) in zip(words, split, strict=True) if not (name and equals)]:
        raise ValueError(f"{wrong[0]!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in split}


def checked(pipeline: str, given: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a pipeline, which are all texts.

    Raises:
        ValueError: one is unknown.
    """
    known = pipeline_of(pipeline).component_spec.inputs
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{pipeline} has no parameter {unknown[0]}; it has {', '.join(sorted(known))}")
    return dict(given)


def readme(pipeline: str) -> str:
    """The description of a pipeline's version in Markdown: what it does, and every field of its form."""
    spec = pipeline_of(pipeline).pipeline_spec
    fields = spec.root.input_definitions.parameters
    lines = [f"- **{name}**: {' '.join(fields[name].description.split())}" for name in sorted(fields)]
    return "\n".join([f"{spec.pipeline_info.description}.", "", *lines])
