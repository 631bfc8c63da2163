"""What commands share: arguments and options, the form of help and usage errors, the check for optional packages."""

from __future__ import annotations

import importlib.util
import math
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from tidemill.errors import RunError


class Command(TyperCommand):
    """A command that prints its help as written, and refuses two mistakes that typer accepts or explains badly."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name: param for param in self.get_params(ctx) for name in param.opts if name.startswith("-")}
        words = iter(args)
        for word in words:
            if word == "--":
                break
            name, equals, _ = word.partition("=")
            option = options.get(name)
            takes_value = isinstance(option, TyperOption) and not option.is_flag and not equals
            if takes_value and next(words, "") in options:
                ctx.fail(f"Option {name!r} requires an argument.")
            if option is None and equals and name.startswith("--"):
                ctx.fail(f"No such option: {name}. A setting has no dashes: {word.lstrip('-')}.")
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{self.help}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = self.get_params(ctx)
        arguments = [(param.metavar, param.help) for param in params if isinstance(param, TyperArgument)]
        options = [
            param.get_help_record(ctx) for param in params if isinstance(param, TyperOption) and not param.hidden
        ]
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def argument(metavar: str, text: str, **more: Any) -> Any:
    """A positional argument with its help text."""
    return typer.Argument(metavar=metavar, help=text, **more)


def option(metavar: str, text: str, **more: Any) -> Any:
    """An option with a value and its help text."""
    return typer.Option(metavar=metavar, help=text, **more)


def flag(name: str, text: str, *more: str) -> Any:
    """An option without a value and its help text."""
    return typer.Option(name, *more, help=text)


def require(library: str) -> None:
    """Check that a library of the extra `pipelines` is installed.

    Raises:
        RunError: it is not; the message says how to install it.
    """
    if importlib.util.find_spec(library) is None:
        raise RunError(f"this command needs the Python package {library}: pip install 'tidemill[pipelines]'")


def not_empty(value: str | list[str] | None) -> str | list[str] | None:
    """Check a value that must say something."""
    for text in [value] if isinstance(value, str) else value or []:
        if not text.strip():
            raise typer.BadParameter("it is empty.")
    return value


def finite(value: float) -> float:
    """Check a number that is at least 0 and finite."""
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number of at least 0.")
    return value


RunFile = Annotated[str, argument("FILE", "run file in YAML")]
OptionalRunFile = Annotated[str | None, argument("FILE", "run file in YAML")]
Settings = Annotated[list[str], argument("KEY.PATH=VALUE", "settings that replace those of the file")]
Resume = Annotated[str | None, option("NAME", "continue this run instead of starting a new one")]
RunsFolder = Annotated[str, option("FOLDER", "folder of runs")]
