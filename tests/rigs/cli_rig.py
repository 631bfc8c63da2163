"""The command line as its parser sees it: the commands, and the arguments of a command line that is not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from tidemill.cli.main import app

GROUP = typer.main.get_command(app)
assert isinstance(GROUP, TyperGroup)
COMMANDS = GROUP.commands


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of a command line such as `["run", "a.yaml"]`, by name.

    Raises:
        typer.TyperException: the command does not take them.
    """
    return COMMANDS[words[0]].make_context(words[0], list(words[1:])).params
