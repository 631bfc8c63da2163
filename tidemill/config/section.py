"""The base class of all groups of settings, and the types and patterns of their values."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Cores = Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]  # a year, which every timer can hold
Fraction = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
RESOURCE = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
BUCKET = r"^[a-z0-9][a-z0-9.-]+[a-z0-9]$"
REGISTERED = r"^[A-Za-z0-9._-]+$"
ALIAS = r"^[A-Za-z][A-Za-z0-9_-]*$"
TAGGED_IMAGE = r"^[^\s:@]+(:\d+/[^\s:@]+)?(:\w[\w.-]{0,127}|@sha256:[0-9a-f]{64})$"
PATTERNS = {
    DNS_LABEL: "lower-case letters, digits and dashes, with a letter or digit first and last",
    OBJECT_NAME: "lower-case letters, digits, dashes and dots, with a letter or digit on both sides of a dot",
    RESOURCE: "the name of an extended resource, such as nvidia.com/gpu",
    LABEL: "the value of a label, such as NVIDIA-H100-80GB-HBM3: letters, digits, dashes, dots and underscores",
    VARIABLE: "letters, digits, underscores, dots and dashes, with a letter or underscore first",
    BUCKET: "lower-case letters, digits, dots and dashes, with a letter or digit first and last",
    REGISTERED: "letters, digits, dots, underscores and dashes",
    ALIAS: "letters, digits, underscores and dashes, with a letter first",
    TAGGED_IMAGE: "an image with a tag, such as registry/name:1.0, or with a digest @sha256:...",
}
"""The patterns of text settings, in words."""
ObjectName = Annotated[str, Field(pattern=OBJECT_NAME, max_length=253)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        """`true` is not 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {get_args(part)[0] if get_origin(part) is Annotated else part for part in (kind, *get_args(kind))}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticCustomError("truth", "Input should be a number")
        return value


def default(section: BaseModel, name: str) -> Any:
    """The default of a setting."""
    return type(section).model_fields[name].get_default(call_default_factory=True)


def is_set(section: BaseModel, name: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(section.model_dump()[name] != default(section, name))
