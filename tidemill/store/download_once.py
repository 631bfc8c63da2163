"""What several processes of one machine need in one folder, brought there once."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Brought = TypeVar("Brought")


def bring_once(folder: Path, name: str, bring: Callable[[], Brought]) -> Brought | None:
    """Let whichever process comes first fill a folder; the others wait, and find it.

    The name of what is there lies beside the folder once it is whole, so that a process that died on the way leaves
    nothing that looks finished.

    Args:
        folder: to be filled.
        name: of what is wanted there; something of another name is replaced.
        bring: fills the folder. If it leaves none, the next process calls it too.

    Returns:
        What `bring` returned; None if it was not called, because another process had been here.
    """
    note = folder.with_suffix(".name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if note.is_file() and note.read_text(encoding="utf-8") == name and folder.is_dir():
            return None
        note.unlink(missing_ok=True)
        brought = bring()
        note.write_text(name, encoding="utf-8")
        return brought


def forget(folder: Path) -> None:
    """Remove a folder and its name; several processes may do so at once."""
    folder.with_suffix(".name").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
