"""What a commit consists of, and whether what comes back is the same."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.errors import CheckpointError
from tidemill.store.object_store import StoredObject

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a commit consists of.

    Attributes:
        format: of the manifest itself.
        run: name of the run.
        version: policy version.
        folder: key below which the parts lie.
        parts: name below `folder`, size in bytes and SHA-256 of each.
    """

    format: int
    run: str
    version: int
    folder: str
    parts: tuple[StoredObject, ...]

    def to_json(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse what `to_json` gave.

        Raises:
            CheckpointError: it is not a manifest of this format.
        """
        try:
            tree = json.loads(data)
            if tree["format"] != FORMAT:
                raise CheckpointError(f"its format is {tree['format']!r} and this Tidemill reads {FORMAT}")
            parts = tuple(StoredObject(str(p["key"]), int(p["nbytes"]), str(p["sha256"])) for p in tree["parts"])
            return cls(FORMAT, str(tree["run"]), int(tree["version"]), str(tree["folder"]), parts)
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"its manifest is damaged ({error!r})") from error


class Nowhere(io.BytesIO):
    """Takes everything and keeps nothing."""

    def write(self, data: Any, /) -> int:
        """The length of `data`."""
        return len(data)


def check_same(part: StoredObject, got: StoredObject, uri: str) -> None:
    """Compare a part as it came with what was committed."""
    if (got.nbytes, got.sha256) != (part.nbytes, part.sha256):
        raise CheckpointError(
            f"checkpoint part {uri} is damaged: {got.nbytes} bytes with SHA-256 {got.sha256}, "
            f"committed were {part.nbytes} with {part.sha256}"
        )
