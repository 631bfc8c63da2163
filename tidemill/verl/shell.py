"""Reads a shell script, without running it: its commands, with the variables that are known.

Understood are assignments, arrays, quotes, comments, continued lines, here-documents, `$NAME`, `${NAME}`,
`${NAME:-default}` and its relatives, `~/`, and integer `$((...))`. What only running the script could tell (the output
of a command, a variable set under a condition) becomes an `Unknown` value; whether that matters is for the reader of
the key to say.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from tidemill.errors import ConfigError
from tidemill.verl.word import MARKED, Text, Unknown, Word

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
BRACED = re.compile(r"([A-Za-z_]\w*|\d+)(?:(:?[-=?])(.*))?", re.DOTALL)
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
ARGUMENTS = re.compile(r'"?\$(?:[@*]|\{[@*](?::\d+)?\})"?')
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
OPENERS, CLOSERS = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
FILLERS = {"then", "else", "do", "export", "declare", "local", "readonly"}
ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


class Reader:
    """A script on its way through: position, variables, and how deep in conditions it is."""

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self.script, self.at, self.depth, self.chained = script, 0, 0, False
        self.variables: dict[str, Text] = dict(environment)
        self.arrays: dict[str, list[Word] | Unknown] = {}
        self.documents: list[str] = []

    def run(self, command: list[Word]) -> list[Word]:
        """Do what an assignment does; returns the words of any other command."""
        while command and command[0].raw in OPENERS | CLOSERS | FILLERS:
            self.depth += (command[0].raw in OPENERS) - (command[0].raw in CLOSERS)
            command = command[1:]
        if all(ASSIGNMENT.match(word.raw) for word in command):
            for word in command:
                self.assign(word)
            return []
        return [part for word in command for part in self.expanded(word)]

    def expanded(self, word: Word) -> list[Word]:
        """The words that the shell makes of one: those of an array, those of an unquoted variable, or itself."""
        if ARGUMENTS.fullmatch(word.raw):
            return []
        array = ARRAY.fullmatch(word.raw)
        if array is None:
            return word.parted()
        elements = self.arrays.get(array[1], Unknown(f"{array[1]} is no array of the script"))
        if isinstance(elements, Unknown):
            return [Word(word.raw, elements)]
        if word.raw.startswith('"'):
            return elements
        return [part for element in elements for part in element.unquoted().parted()]

    def assign(self, word: Word) -> None:
        """Set a variable or an array; under a condition nobody knows whether."""
        match = ASSIGNMENT.match(word.raw)
        assert match is not None
        name, conditional = match[1], self.depth > 0 or self.chained
        unknown = Unknown(f"{name} is set under a condition")
        if word.elements is not None:
            before = self.arrays.get(name, []) if match[2] else []
            parts = [part for element in word.elements for part in self.expanded(element)]
            known = before if isinstance(before, Unknown) else before + parts
            self.arrays[name] = unknown if conditional else known
            return
        text = word.whole
        if isinstance(text, str):
            text = text.partition("=")[2]
            before_text = self.variables.get(name, "") if match[2] else ""
            text = before_text + text if isinstance(before_text, str) else before_text
        self.variables[name] = unknown if conditional else text

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
                chained = self.separator()
                yield command
                self.chained = chained or (self.chained and not command)
                command = []
            else:
                command.append(self.word())
        yield command

    def separator(self) -> bool:
        """Pass what ends a command; whether the next one is run only if this one fails or succeeds."""
        document = DOCUMENT.match(self.script, self.at)
        if document is not None:
            self.documents.append(document[2])
            self.at = document.end()
            return False
        doubled = self.script[self.at : self.at + 2] in ("&&", "||")
        newline = self.script[self.at] == "\n"
        self.at += 2 if doubled else 1
        if newline:
            self.pass_documents()
        return doubled

    def pass_documents(self) -> None:
        """Pass the text of here-documents, which begins with this line."""
        for name in self.documents:
            end = re.compile(rf"^\t*{re.escape(name)}$", re.MULTILINE).search(self.script, self.at)
            self.at = len(self.script) if end is None else end.end()
        self.documents = []

    def end_of_line(self) -> int:
        """Where the present line ends."""
        end = self.script.find("\n", self.at)
        return len(self.script) if end < 0 else end

    def word(self, *, everything: bool = False) -> Word:
        """The word that begins here; `everything` up to the end of the script is one."""
        word, quoted = Word(), False
        while self.at < len(self.script):
            character, start = self.script[self.at], self.at
            if character == '"':
                quoted = not quoted
                self.at += 1
                word.add(character, "")
            elif character == "'" and not quoted:
                self.at = self.closing("'", start + 1)
                word.add(self.script[start : self.at], self.script[start + 1 : self.at - 1])
            elif character == "\\":
                self.at += 2
                word.add(self.script[start : self.at], unescaped(self.script[start + 1 : self.at], quoted))
            elif character in "$`":
                text = self.expansion(quoted)
                word.add(self.script[start : self.at], text)
            elif not quoted and character == "~" and self.is_home(word):
                self.at += 1
                word.add(character, self.variable("HOME"))
            elif not quoted and character == "(" and ASSIGNMENT.fullmatch(word.raw):
                word.elements = self.elements()
                word.add(self.script[start : self.at], "")
            elif not (quoted or everything) and character in " \t\n;&|()<>":
                break
            else:
                self.at += 1
                word.add(character, character if quoted else character.translate(MARKED))
        if quoted:
            raise ConfigError("SCRIPT", word.raw[:60], "text with a closing quote", "Mend the script.")
        return word

    def is_home(self, word: Word) -> bool:
        """Whether the tilde here stands for the home folder; verl reads `key=~/...` so, too."""
        return (not word.raw or word.raw.endswith("=")) and self.script[self.at + 1 : self.at + 2] in ("/", "")

    def elements(self) -> list[Word]:
        """The words of the array whose bracket opens here."""
        start = self.at
        words: list[Word] = []
        self.at += 1
        while self.at < len(self.script):
            character = self.script[self.at]
            if character == ")":
                self.at += 1
                return words
            if character == "#":
                self.at = self.end_of_line()
            elif character in " \t\n;&|(<>" or self.script.startswith("\\\n", self.at):
                self.at += 2 if character == "\\" else 1
            else:
                words.append(self.word())
        raise ConfigError("SCRIPT", self.script[start : start + 40], "a closing )", "Mend the script.")

    def closing(self, mark: str, start: int) -> int:
        """Just behind the next `mark`."""
        end = self.script.find(mark, start)
        if end < 0:
            raise ConfigError("SCRIPT", self.script[start - 1 : start + 40], f"a closing {mark}", "Mend the script.")
        return end + 1

    def expansion(self, quoted: bool) -> Text:
        """What stands for the `$...` or the backquotes that begin here; see `Word.text`."""
        start = self.at
        if self.script[start] == "`":
            self.at = self.closing("`", start + 1)
            if re.fullmatch(r"\s*#.*", self.script[start + 1 : self.at - 1]):
                return ""  # a comment among continued lines
            return Unknown(f"{self.script[start : self.at]} is the output of a command")
        if self.script.startswith("$(", start):
            self.at = self.balanced(start + 1, "()")
            inner = self.script[start + 2 : self.at - 1]
            if inner.startswith("(") and inner.endswith(")"):
                return self.arithmetic(inner[1:-1])
            return Unknown(f"$({inner}) is the output of a command")
        if self.script.startswith("${", start):
            self.at = self.balanced(start + 1, "{}")
            return self.braced(self.script[start + 2 : self.at - 1], quoted)
        name = NAME.match(self.script, start + 1)
        if name is None:
            self.at = start + 2
            return Unknown(f"{self.script[start : self.at]} is known to the shell only")
        self.at = name.end()
        return partible(self.variable(name[0]), quoted)

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

    def braced(self, inner: str, quoted: bool) -> Text:
        """`NAME`, or with what stands for it if it is not set: `NAME:-default`, `NAME:=default`, `NAME:?message`."""
        match = BRACED.fullmatch(inner)
        if match is None:
            return Unknown(f"${{{inner}}} is not read")
        name, mark = match[1], match[2] or ""
        value = self.variables.get(name)
        if value is not None and not (value == "" and mark.startswith(":")):
            return partible(value, quoted)
        if mark[-1:] in ("", "?"):
            return self.variable(name)
        word = self.meaning(match[3], quoted)
        if mark.endswith("="):
            self.variables[name] = word.whole
        return word.text

    def meaning(self, text: str, quoted: bool) -> Word:
        """What a text means, between double quotes or not, with the variables of now."""
        reader = Reader(f'"{text.strip(chr(34))}"' if quoted else text, {})
        reader.variables = self.variables
        return reader.word(everything=True)

    def arithmetic(self, inner: str) -> Text:
        """An integer expression; `/` cuts towards zero."""
        meaning = self.meaning(inner, True).text if "$" in inner else inner
        if isinstance(meaning, Unknown):
            return meaning
        try:
            return str(self.number(ast.parse(meaning.replace("/", "//").strip(), mode="eval").body))
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


def partible(text: Text, quoted: bool) -> Text:
    """The value of a variable, whose blanks part words unless it stands between double quotes."""
    return text if quoted or isinstance(text, Unknown) else text.translate(MARKED)


def unescaped(text: str, quoted: bool) -> str:
    """What stands for a backslash and the character behind it; between double quotes few are special."""
    if text == "\n":
        return ""
    return f"\\{text}" if quoted and text not in ('"', "$", "`", "\\") else text
