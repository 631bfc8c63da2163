from __future__ import annotations

import pytest
import torch
from copies import Copies
from torch import nn

from tidemill.train.version_start import VersionStart

NBYTES = 4 * (3 * 2 + 2)


def make_start(steps: int, *, kept: bool = True) -> tuple[nn.Linear, VersionStart]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    return layer, VersionStart(layer, steps, kept=kept)


def update(layer: nn.Linear, start: VersionStart, version: int) -> int:
    """An optimizer step that adds 1 to every parameter; returns the bytes that `keep` copied."""
    start.enter(version)
    with Copies([*layer.parameters(), *start.copies.values()]) as copies:
        start.keep()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    start.leave()
    return copies.nbytes


def test_a_version_of_several_steps_is_copied_once_before_its_first() -> None:
    layer, start = make_start(3)
    assert [update(layer, start, version) for version in (5, 5, 5, 6, 6, 6)] == [NBYTES, 0, 0, NBYTES, 0, 0]


def test_a_version_of_one_step_is_never_copied() -> None:
    layer, start = make_start(1)
    assert [update(layer, start, version) for version in range(3)] == [0, 0, 0]
    assert start.copies == {}


def test_a_start_that_is_not_needed_is_not_kept() -> None:
    layer, start = make_start(3, kept=False)
    assert [update(layer, start, 0) for _ in range(3)] == [0, 0, 0]
    assert start.copies == {}


def test_later_versions_reuse_the_memory_of_the_first() -> None:
    layer, start = make_start(2)
    pointers = []
    for version in (0, 0, 1, 1):
        update(layer, start, version)
        pointers.append([copy.data_ptr() for copy in start.copies.values()])
    assert all(found == pointers[0] for found in pointers)


def test_an_exchange_copies_no_tensor() -> None:
    layer, start = make_start(3)
    before = layer.weight.detach().clone()
    update(layer, start, 0)
    weight = layer.weight  # the object that an optimizer has
    present, kept = weight.data_ptr(), start.copies[weight].data_ptr()
    with Copies([*layer.parameters(), *start.copies.values()]) as copies, start.exchanged():
        assert layer.weight.data_ptr() == kept
        assert torch.equal(layer.weight, before)
    assert (layer.weight.data_ptr(), copies.nbytes) == (present, 0)
    assert layer.weight is weight
    assert torch.equal(layer.weight, before + 1)


def test_a_failure_inside_restores_the_current_parameters() -> None:
    layer, start = make_start(3)
    update(layer, start, 0)
    present = layer.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), start.exchanged():
        raise RuntimeError("inside")
    assert layer.weight.data_ptr() == present


def test_steps_of_a_version_are_counted_as_shares() -> None:
    layer, start = make_start(4)
    shares = []
    for version in (2, 2, 2, 2, 3):
        start.enter(version)
        shares.append((start.is_current, start.done))
        update(layer, start, version)
    assert shares == [(True, 0.0), (False, 0.25), (False, 0.5), (False, 0.75), (True, 0.0)]


def test_replaced_parameters_start_a_version() -> None:
    layer, start = make_start(4)
    update(layer, start, 2)
    start.forget()
    start.enter(2)
    assert start.is_current


def test_a_tied_parameter_stays_tied() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    start = VersionStart(model, 2, kept=True)
    start.enter(0)
    start.keep()
    assert len(start.copies) == 1
    with start.exchanged():
        assert model["head"].weight is model["embedding"].weight is start.copies[start.parameters["head.weight"]]
    assert model["head"].weight is model["embedding"].weight
