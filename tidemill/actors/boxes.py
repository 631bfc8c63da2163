"""How the bytes of groups travel: groups that are put at once share one object in Ray's store.

    put, put, put ─► pack ─► Boxed(box, 0), Boxed(box, 1), Boxed(box, 2) ─► the queue ─► lease ─► unpack ─► views
                      └────► one object: [array, array, array] ─────────────────────────────────────┘

An object costs a millisecond whatever its size, so one for every group would be what a put mostly pays for. A box stays
in memory until the last of its groups was trained or dropped. They were put within milliseconds, and none may wait for
longer than `max_staleness` versions, so a box lives no longer than a group may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from tidemill.actors.call import call
from tidemill.records import Buffer

PACKER = "who put a group into the queue"
INLINE_BYTES = 32_000  # of a batch that is sent as it is: below it Ray itself would send an object inside the call


@dataclass(frozen=True, slots=True)
class Boxed:
    """A payload in Ray's object store.

    Attributes:
        box: ObjectRef of a list of uint8 arrays.
        place: which of them.
    """

    box: Any
    place: int


def pack(payloads: Sequence[Buffer]) -> list[Buffer | Boxed]:
    """Put payloads into the object store, all as one object, or leave them as they are where they are few bytes."""
    if sum(map(len, payloads)) <= INLINE_BYTES:
        return list(payloads)
    box = ray.put([np.frombuffer(payload, np.uint8) for payload in payloads])
    return [Boxed(box, place) for place in range(len(payloads))]


async def unpack(payloads: Sequence[Buffer | Boxed]) -> list[Buffer]:
    """What was packed, as read-only views of the object store where it is there; every box is fetched once.

    Raises:
        RunError: a box is lost, because the process that packed it died.
    """
    boxes = list({payload.box: None for payload in payloads if isinstance(payload, Boxed)})
    contents = dict(zip(boxes, await asyncio.gather(*(call(PACKER, box) for box in boxes)), strict=True))
    return [contents[payload.box][payload.place] if isinstance(payload, Boxed) else payload for payload in payloads]
