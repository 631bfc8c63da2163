"""The pages for a reader: their links lead somewhere, and the commands in them are taken."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_rig import COMMANDS, parsed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`tidemill ([a-z-]+)")
ENDS = frozenset({"|", ">", "&&"})


def anchors(page: Path) -> set[str]:
    """What links may name in a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every `tidemill` in a block of commands."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "tidemill " in line else []
            if words[:1] == ["tidemill"]:
                yield words[1 : next((place for place, word in enumerate(words) if word in ENDS), None)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_taken(page: Path) -> None:
    assert set(NAMED.findall(page.read_text(encoding="utf-8"))) <= set(COMMANDS)
    for words in commands(page):
        parsed(words)


def test_pages_have_commands_to_look_at_and_the_readme_names_all_there_are() -> None:
    assert len([words for page in PAGES for words in commands(page)]) > 20
    assert [
        name
        for name in COMMANDS
        if f"`{name}`" not in (text := PAGES[0].read_text()) and f"tidemill {name}" not in text
    ] == []
