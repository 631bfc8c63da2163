"""The `key=value` settings of a verl command in a shell script, or in a file of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tidemill.errors import ConfigError
from tidemill.verl.overrides import overrides
from tidemill.verl.shell import Reader
from tidemill.verl.word import Text, Unknown, Word

OPTIONS = {
    **dict.fromkeys(("--config-name", "-cn"), re.compile(r"fully_async_ppo_trainer(?:\.yaml)?")),
    **dict.fromkeys(("--config-path", "-cp"), re.compile(r"(?:.*fully_async_policy/)?config/?")),
}


def read_settings(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Text]:
    """The settings of the one verl command in a script, in order; of a key given twice the last value.

    Args:
        script: text of the script, or of a file of settings in YAML, see `overrides`.
        arguments: of the script: further settings, which stand last.
        environment: variables that the script starts with.

    Raises:
        ConfigError: there is no such command, there are several, or it has words that are no settings.
    """
    given = overrides(script)
    words = [Word(setting, setting) for setting in given] if given else the_command(script, environment)
    settings: dict[str, Text] = {}
    for word in [*words, *(Word(argument, argument) for argument in arguments)]:
        match = word.setting
        if match is None or (match[1] == "~") == bool(match[3]):
            fix = (
                f"{word.text.why}. Write it out." if isinstance(word.text, Unknown) else "Only settings are converted."
            )
            raise ConfigError("SCRIPT", word.raw, "key.path=value or ~key.path", fix)
        settings.pop(match[2], None)
        if match[3]:
            settings[match[2]] = word.text if isinstance(word.text, Unknown) else word.text.partition("=")[2]
    return settings


def the_command(script: str, environment: Mapping[str, str]) -> list[Word]:
    """The words of the one command of a script that has settings."""
    reader = Reader(script, environment)
    commands = [launched(words) for words in map(reader.run, reader.commands()) if any(map(is_dotted, words))]
    if len(commands) != 1:
        several = "Keep one of them. A comment or an empty line among continued lines ends a command."
        none = "Write its settings into the script, as they stand on a command line, not into a file that it reads."
        raise ConfigError(
            "SCRIPT",
            f"{len(commands)} commands with key=value settings",
            "one command of the form `python -m verl... key=value ...`",
            several if commands else none,
        )
    return commands[0]


def launched(command: list[Word]) -> list[Word]:
    """The words behind `python -m MODULE`, or FILE.py, of the command that has settings, options left out.

    Raises:
        ConfigError: it takes its defaults from another file of verl.
    """
    module = next((n + 2 for n, word in enumerate(command) if word.raw == "-m"), 0)
    module = module or next((n + 1 for n, word in enumerate(command) if word.raw.endswith(".py")), 0)
    words: list[Word] = []
    rest = iter(command[module:])
    for word in rest:
        option, equals, _ = word.raw.partition("=")
        if option in OPTIONS:
            check_option(option, word if equals else next(rest, Word()))
        elif words or not word.raw.startswith("-"):
            words.append(word)
    # Without a module in sight, what stands before the first setting launches.
    return words if module else words[next((n for n, word in enumerate(words) if is_dotted(word)), len(words)) :]


def check_option(option: str, word: Word) -> None:
    """Refuse defaults that are not known here.

    Raises:
        ConfigError: they come from another file of verl, or from somebody else's.
    """
    value = word.text if isinstance(word.text, str) else word.raw.strip("\"'")
    value = value.removeprefix(f"{option}=")
    if not OPTIONS[option].fullmatch(value):
        fix = "Write the settings of that file into the script. The trainer is data-parallel (FSDP), not megatron."
        allowed = "verl's config/fully_async_ppo_trainer.yaml, whose defaults are known here"
        raise ConfigError("SCRIPT", f"{option}={value}", allowed, fix)


def is_dotted(word: Word) -> bool:
    """Whether a word sets a key with a dot, as no other command has."""
    match = word.setting
    return match is not None and bool(match[3]) and "." in match[2]
