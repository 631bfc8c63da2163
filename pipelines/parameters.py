"""Parameters of a pipeline as a person writes them, `NAME=VALUE`, and as KFP takes them: numbers stay numbers."""

from collections.abc import Callable, Mapping, Sequence

from tidemill_pipelines.catalogue import pipeline_of

Value = str | int | float
TYPES: Mapping[str, Callable[[str], Value]] = {"String": str, "Integer": int, "Float": float}


def pairs(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` each, by name.

    Raises:
        ValueError: one is something else.
    """
    split = [word.partition("=") for word in words]
    if wrong := [word for word, (name, equals, _) in zip(words, split, strict=True) if not (name and equals)]:
        raise ValueError(f"{wrong[0]!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in split}


def typed(pipeline: str, given: Mapping[str, str]) -> dict[str, Value]:
    """The parameters of a pipeline, each of its type.

    Raises:
        ValueError: one is unknown or missing, or its value is of another type.
    """
    known = pipeline_of(pipeline).component_spec.inputs
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{pipeline} has no parameter {unknown[0]}; it has {', '.join(known)}")
    if missing := [name for name, spec in known.items() if not spec.optional and name not in given]:
        raise ValueError(f"{pipeline} needs the parameter {missing[0]}")
    return {name: convert(name, value, known[name].type) for name, value in given.items()}


def convert(name: str, value: str, kind: str) -> Value:
    """A value of its type."""
    try:
        converted: Value = TYPES[kind](value)
    except ValueError as error:
        raise ValueError(f"{name} = {value!r} is not of the type {kind}") from error
    return converted
