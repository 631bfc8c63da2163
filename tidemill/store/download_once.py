"""A folder that several processes of one machine need, and that only the first of them fills."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")


def download_once(folder: Path, name: str, download: Callable[[], T]) -> T | None:
    """Let the first process fill a folder; the others wait, and find it.

    The name of the content is written beside the folder at the end, so that a process that died during the download
    leaves nothing that looks complete.

    Args:
        folder: to fill.
        name: of the wanted content; content of another name is replaced.
        download: fills the folder. If it fails, the next process calls it too.

    Returns:
        The result of `download`; None if it was not called, because the folder was complete.
    """
    note = folder.with_suffix(".name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if note.is_file() and note.read_text(encoding="utf-8") == name and folder.is_dir():
            return None
        note.unlink(missing_ok=True)
        result = download()
        note.write_text(name, encoding="utf-8")
        return result


def remove_download(folder: Path) -> None:
    """Remove a folder and its name; several processes may do so at once."""
    folder.with_suffix(".name").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
