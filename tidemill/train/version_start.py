"""The parameters that the present policy version began with.

    version 4                                  version 5
    step 0           step 1       step 2       step 0
    start = present  start kept   start kept   start = present
    copy, update     update       update       copy, update

While a version's first step computes, its start and the present parameters are the same, so nothing is kept and nothing
is computed twice. They are copied, once a version, right before that step changes them; with one step a version never.
To compute with the start, references are exchanged: no tensor moves. A rank does so with the rows that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tidemill.train.shards import Place


class VersionStart:
    """Counts the optimizer steps of a version, and keeps the parameters it began with if they are asked for."""

    def __init__(self, places: Mapping[str, Place], steps: int, *, kept: bool) -> None:
        """Begin before the first version.

        Args:
            places: of the parameters of this rank, which an optimizer changes in place.
            steps: optimizer steps of a version.
            kept: whether `exchanged` will be asked for.
        """
        self.places, self.steps, self.kept = places, steps, kept
        self.version, self.step = -1, 0
        self.copies: dict[str, Tensor] = {}

    def enter(self, version: int) -> None:
        """The coming step trains this version; a new one begins with the present parameters."""
        if version != self.version:
            self.version, self.step = version, 0

    def leave(self) -> None:
        """An optimizer step is done."""
        self.step += 1

    def forget(self) -> None:
        """The parameters were replaced: whatever version comes next begins with them."""
        self.version = -1

    @property
    def done(self) -> float:
        """Share of the version's optimizer steps that are done."""
        return self.step / self.steps

    @property
    def is_present(self) -> bool:
        """Whether the version's start is the present parameters."""
        return self.step == 0

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the present parameters, if they are the start and later steps will ask for it."""
        if not self.kept or not self.is_present or self.steps == 1:
            return
        for name, place in self.places.items():
            if name in self.copies:
                self.copies[name].copy_(place.tensor)
            else:
                self.copies[name] = place.tensor.clone()

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Inside, the model computes with the version's start."""
        assert self.copies, f"version {self.version} has more than its {self.steps} steps"
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the kept and the present parameters, by reference."""
        for name, place in self.places.items():
            place.tensor, self.copies[name] = self.copies[name], place.tensor
