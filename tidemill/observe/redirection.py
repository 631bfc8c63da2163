"""What libraries and their processes write to standard output and error, and where it goes instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def diverted(target: Path | str) -> Iterator[TextIO]:
    """Within the body everything is appended to a file; yields the screen that was standard output.

    After success standard error stays diverted, for what libraries say while the interpreter ends.
    """
    sys.stdout.flush()
    output, errors = os.dup(1), os.dup(2)
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        with os.fdopen(os.dup(output), "w", encoding=sys.stdout.encoding) as screen:
            yield screen
    except BaseException:
        os.dup2(errors, 2)
        raise
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        for descriptor in (output, errors, file):
            os.close(descriptor)
