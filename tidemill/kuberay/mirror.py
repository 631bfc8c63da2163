"""Brings the events of an attempt from the store to the folder of this step, and shows them as `tidemill run` does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import StoreGapError
from tidemill.observe.console import Progress
from tidemill.observe.events import Event, EventLog, Notice, StepFinished, parse_line
from tidemill.store.attempt import Attempt
from tidemill.store.journal import JournalReader
from tidemill.store.object_store import ObjectStore

MARK = "mirrored.json"


@dataclass(slots=True)
class Screen:
    """Where events go: the log of the step's folder, and whoever watches."""

    log: EventLog
    progress: Progress

    def tell(self, event: Event) -> None:
        """Write and show an event."""
        self.log.write(event)
        self.progress.handle(event)


@dataclass(slots=True)
class Mirror:
    """The events of one attempt; a step that is started again in the same folder goes on where it was.

    Attributes:
        reader: of the attempt's events.
        screen: where they go.
        mark: file that says how far they went.
        attempt: number of the attempt.
        rest: a line that is not whole yet.
        lines: how many were read.
        last: the newest step, None before the first.
    """

    reader: JournalReader
    screen: Screen
    mark: Path
    attempt: int
    rest: bytes = b""
    lines: int = 0
    last: StepFinished | None = None

    @classmethod
    def of(cls, store: ObjectStore, attempt: Attempt, screen: Screen) -> Mirror:
        """The mirror of an attempt, from the beginning or from the mark that an earlier step left."""
        mark = screen.log.path.with_name(MARK)
        earlier = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}
        offset = earlier["offset"] if earlier.get("attempt") == attempt.number else 0
        return cls(JournalReader(store, attempt.events, offset), screen, mark, attempt.number)

    def read(self) -> bytes:
        """What is new; events that are missing are told of and passed over, the run has them behind it."""
        try:
            return self.reader.read()
        except StoreGapError as gap:
            self.screen.tell(Notice(f"{gap}; the log goes on behind them"))
            self.reader.offset, self.rest = gap.end, b""
            return b""

    def catch_up(self) -> None:
        """Tell what has happened since the last call.

        Raises:
            StoreError: the store cannot be reached.
        """
        *lines, self.rest = (self.rest + self.read()).split(b"\n")
        for line in lines:
            self.lines += 1
            if line:
                event = parse_line(Path(self.reader.prefix), self.lines, line)
                self.last = event if isinstance(event, StepFinished) else self.last
                self.screen.tell(event)
        if lines:
            whole = self.reader.offset - len(self.rest)
            self.mark.write_text(json.dumps({"attempt": self.attempt, "offset": whole}), encoding="utf-8")
