"""Reads the `key=value` settings of a verl command out of a shell script, without running it.

Understood are assignments, quotes, comments, continued lines, `$NAME`, `${NAME}`, `${NAME:-default}` and integer
`$((...))`. What only running the script could tell (the output of a command, a variable set under a condition) becomes
an `Unknown` value; whether that matters is for the reader of the key to say.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill.errors import ConfigError

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
SETTING = re.compile(r"(~|\+{0,2})([A-Za-z_]\w*(?:\.\w+)+)(=|$)")
BRACED = re.compile(r"([A-Za-z_]\w*|[@*])(?:(:?-)(.*))?", re.DOTALL)
OPENERS, CLOSERS = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
ARGUMENTS = {'"$@"', "$@", '"${@}"', "${@}"}
FILLERS = {"then", "else", "do", "export", "declare", "local", "readonly"}
ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only the shell could tell, and why."""

    why: str


Text = str | Unknown


@dataclass(slots=True)
class Word:
    """A word of a command: as it is written, and what the shell makes of it."""

    raw: str = ""
    text: Text = ""

    @property
    def setting(self) -> re.Match[str] | None:
        """The word as a setting: `KEY=...` or `~KEY`; quotes may stand around all of it."""
        return SETTING.match(self.text if isinstance(self.text, str) else self.raw.strip("\"'"))

    def add(self, raw: str, text: Text) -> None:
        """Append a piece."""
        self.raw += raw
        if isinstance(self.text, str):
            self.text = self.text + text if isinstance(text, str) else text


def read_settings(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Text]:
    """The settings of the one verl command in a script, in order; of a key given twice the last value.

    Args:
        script: text of the script.
        arguments: of the script: further settings, which stand last.
        environment: variables that the script starts with.

    Raises:
        ConfigError: there is no such command, there are several, or it has words that are no settings.
    """
    reader = Reader(script, environment)
    commands = [command for command in map(reader.run, reader.commands()) if command]
    if len(commands) != 1:
        raise ConfigError(
            "SCRIPT",
            f"{len(commands)} commands with key=value settings",
            "one command of the form `python -m verl... key=value ...`",
            "Keep one of them." if commands else "Write its settings into the script, not into a file that it reads.",
        )
    settings: dict[str, Text] = {}
    for word in [*commands[0], *(Word(argument, argument) for argument in arguments)]:
        match = word.setting
        if match is None or (match[1] == "~") == bool(match[3]):
            raise ConfigError("SCRIPT", word.raw, "key.path=value or ~key.path", "Only settings can be converted.")
        settings.pop(match[2], None)
        if match[3]:
            settings[match[2]] = word.text if isinstance(word.text, Unknown) else word.text.partition("=")[2]
    return settings


class Reader:
    """A script on its way through: position, variables, and how deep in conditions it is."""

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self.script, self.at, self.depth = script, 0, 0
        self.variables: dict[str, Text] = dict(environment)

    def run(self, command: list[Word]) -> list[Word]:
        """Do what an assignment does; returns the settings of any other command, if it has some."""
        while command and command[0].raw in OPENERS | CLOSERS | FILLERS:
            self.depth += (command[0].raw in OPENERS) - (command[0].raw in CLOSERS)
            command = command[1:]
        if all(ASSIGNMENT.match(word.raw) for word in command):
            for word in command:
                self.assign(word)
            return []
        first = next((n for n, word in enumerate(command) if word.setting and "=" in word.raw), None)
        if first is None:
            return []
        if launcher := [word.raw for word in command[:first] if "megatron" in word.raw]:
            raise ConfigError("SCRIPT", launcher[0], "the settings of FSDP", "The trainer is data-parallel.")
        return [word for word in command[first:] if word.raw not in ARGUMENTS]

    def assign(self, word: Word) -> None:
        """Set a variable; under a condition nobody knows whether."""
        name = word.raw.partition("=")[0]
        text = word.text.partition("=")[2] if isinstance(word.text, str) else word.text
        self.variables[name] = Unknown(f"{name} is set under a condition") if self.depth else text

    def commands(self) -> Iterator[list[Word]]:
        """Commands one after the other; each is run before the next is read."""
        command: list[Word] = []
        while self.at < len(self.script):
            character = self.script[self.at]
            if character in " \t" or self.script.startswith("\\\n", self.at):
                self.at += 2 if character == "\\" else 1
            elif character == "#":
                self.at = self.end_of_line()
            elif character in "\n;&|()<>":
                if character in "<>" and command and command[-1].raw.isdecimal():
                    command.pop()  # the number of a redirected stream
                self.at += 1
                yield command
                command = []
            else:
                command.append(self.word())
        yield command

    def end_of_line(self) -> int:
        """Where the present line ends."""
        end = self.script.find("\n", self.at)
        return len(self.script) if end < 0 else end

    def word(self) -> Word:
        """The word that begins here."""
        word, quoted = Word(), False
        while self.at < len(self.script):
            character = self.script[self.at]
            start = self.at
            if character == "'" and not quoted:
                self.at = self.closing("'", start + 1)
                word.add(self.script[start : self.at], self.script[start + 1 : self.at - 1])
            elif character == '"':
                quoted = not quoted
                self.at += 1
                word.add(character, "")
            elif character == "\\":
                self.at += 2
                escaped = self.script[start + 1 : self.at]
                word.add(self.script[start : self.at], "" if escaped == "\n" else escaped)
            elif character in "$`":
                text = self.expansion()
                word.add(self.script[start : self.at], text)
            elif not quoted and character == "(" and word.raw.endswith("="):
                self.at = self.closing(")", start)
                word.add(self.script[start : self.at], Unknown("arrays are not read"))
            elif not quoted and character in " \t\n;&|()<>":
                break
            else:
                self.at += 1
                word.add(character, character)
        if quoted:
            raise ConfigError("SCRIPT", word.raw[:60], "text with a closing quote", "Mend the script.")
        return word

    def closing(self, mark: str, start: int) -> int:
        """Just behind the next `mark`."""
        end = self.script.find(mark, start)
        if end < 0:
            raise ConfigError("SCRIPT", self.script[start - 1 : start + 40], f"a closing {mark}", "Mend the script.")
        return end + 1

    def expansion(self) -> Text:
        """What stands for the `$...` or the backquotes that begin here."""
        start = self.at
        if self.script[start] == "`":
            self.at = self.closing("`", start + 1)
            return Unknown(f"{self.script[start : self.at]} is the output of a command")
        if self.script.startswith("$(", start):
            self.at = self.balanced(start + 1, "()")
            inner = self.script[start + 2 : self.at - 1]
            if inner.startswith("(") and inner.endswith(")"):
                return self.arithmetic(inner[1:-1])
            return Unknown(f"$({inner}) is the output of a command")
        if self.script.startswith("${", start):
            self.at = self.balanced(start + 1, "{}")
            return self.braced(self.script[start + 2 : self.at - 1])
        name = NAME.match(self.script, start + 1)
        if name is None:
            self.at = start + 2
            return Unknown(f"{self.script[start : self.at]} is known to the shell only")
        self.at = name.end()
        return self.variable(name[0])

    def balanced(self, start: int, pair: str) -> int:
        """Just behind the bracket that closes the one at `start`."""
        depth = 0
        for position in range(start, len(self.script)):
            depth += (self.script[position] == pair[0]) - (self.script[position] == pair[1])
            if depth == 0:
                return position + 1
        raise ConfigError("SCRIPT", self.script[start : start + 40], f"a closing {pair[1]}", "Mend the script.")

    def variable(self, name: str) -> Text:
        """The value of a variable."""
        return self.variables.get(name, Unknown(f"{name} is not set in the script"))

    def braced(self, inner: str) -> Text:
        """`NAME`, or `NAME:-default`."""
        match = BRACED.fullmatch(inner)
        if match is None or match[1] in "@*":
            return Unknown(f"${{{inner}}} is not read")
        value = self.variables.get(match[1], "" if match[2] else self.variable(match[1]))
        if match[2] and (value == "" if match[2] == ":-" else match[1] not in self.variables):
            return Reader(f'"{match[3].strip(chr(34))}"', {}).within(self.variables)
        return value

    def within(self, variables: Mapping[str, Text]) -> Text:
        """The text of one word, with the variables of another script."""
        self.variables = dict(variables)
        return self.word().text

    def arithmetic(self, inner: str) -> Text:
        """An integer expression; `/` cuts towards zero."""
        names = re.sub(r"\$\{?(\w+)\}?", r"\1", inner)
        try:
            return str(self.number(ast.parse(names.replace("/", "//").strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return Unknown(f"$(({inner})) is no sum of known integers")

    def number(self, node: ast.expr) -> int:
        """The value of a part of an expression."""
        if isinstance(node, ast.BinOp):
            return ARITHMETIC[type(node.op)](self.number(node.left), self.number(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.number(node.operand)
        if isinstance(node, ast.Name):
            value = self.variable(node.id)
            if isinstance(value, Unknown):
                raise ValueError(value.why)
            return int(value)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError(ast.dump(node))
