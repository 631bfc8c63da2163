"""The parameters that the current policy version started with.

    version 4                                  version 5
    step 0           step 1       step 2       step 0
    start = current  start kept   start kept   start = current
    copy, update     update       update       copy, update

In the first step of a version, its start equals the current parameters, so nothing is stored or computed twice. They
are copied once per version, right before the first step changes them; with one step per version, never. To compute with
the start, the network exchanges its `Parameter` objects by reference: no tensor is copied. The exception are parameters
whose first dimension the number of ranks does not divide, because FSDP stores them padded and pads them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class VersionStart:
    """Counts the optimizer steps of a version, and keeps the parameters it started with if they are needed."""

    def __init__(self, network: nn.Module, steps: int, *, kept: bool) -> None:
        """Begin before the first version.

        Args:
            network: sharded or not; an optimizer changes its parameters in place.
            steps: optimizer steps per version.
            kept: whether `exchanged` is going to be used.
        """
        self.network, self.steps, self.kept = network, steps, kept
        self.version, self.step = -1, 0
        self.parameters = dict(network.named_parameters(remove_duplicate=False))  # a tied one has several names
        self.copies: dict[nn.Parameter, nn.Parameter] = {}

    def enter(self, version: int) -> None:
        """The coming step trains `version`; a new version starts with the current parameters."""
        if version != self.version:
            self.version, self.step = version, 0

    def leave(self) -> None:
        self.step += 1

    def forget(self) -> None:
        """The parameters were replaced: the next version, whatever its number, starts with them."""
        self.version = -1

    @property
    def done(self) -> float:
        return self.step / self.steps

    @property
    def is_current(self) -> bool:
        """Whether the version's start equals the current parameters."""
        return self.step == 0

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current parameters, if they are the version's start and later steps need it."""
        if not self.kept or not self.is_current or self.steps == 1:
            return
        for parameter in self.network.parameters():
            if parameter in self.copies:
                self.copies[parameter].copy_(parameter)
            else:
                self.copies[parameter] = nn.Parameter(parameter.detach().clone())

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        assert self.copies, f"version {self.version} has more than its {self.steps} steps"
        try:
            self.assign({name: self.copies[parameter] for name, parameter in self.parameters.items()})
            yield
        finally:
            self.assign(self.parameters)

    def assign(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replace the network's `Parameter` objects; FSDP takes over the new ones in its hook of `load_state_dict`."""
        self.network.load_state_dict(parameters, strict=False, assign=True)  # buffers are not part of it
