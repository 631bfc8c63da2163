"""A lock file: it keeps a second process out for as long as the first one lives, and says whose it is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.errors import RunError

OTHER_FOLDER = "Name another folder with output=..."


@contextmanager
def held(path: Path, refusal: Callable[[str], str]) -> Iterator[int]:
    """Hold a lock file, which is made; yields its descriptor.

    The lock is held by the processes that inherit it too, and ends with the last of them.

    Args:
        path: of the file.
        refusal: the message for whoever comes second, given what `label` wrote.

    Raises:
        RunError: another process holds it, or its folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot make {path.parent}: {error}. {OTHER_FOLDER}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(refusal(file.read().strip())) from None
        yield file.fileno()


def label(lock: int, text: str) -> None:
    """Write into a lock whose it is.

    Raises:
        RunError: the disk is full, for example.
    """
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, text.encode(), 0)
    except OSError as error:
        raise RunError(f"cannot write a lock file in the folder of runs: {error}. {OTHER_FOLDER}") from error
