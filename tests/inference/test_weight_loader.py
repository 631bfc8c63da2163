"""What vLLM says of a model's layers while it loads new weights into them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tidemill.weights.tensor_files import MappedWeights, write_tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class Table(nn.Module):
    """A layer that has no weight, as a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(2), persistent=False)


class Model(nn.Module):
    """Two layers, and what its loader says that it loaded."""

    def __init__(self, *, says: bool) -> None:
        super().__init__()
        self.dense, self.table, self.says = nn.Linear(2, 2, bias=False), Table(), says

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        [(name, weight)] = weights
        parameter = self.dense.weight
        parameter.weight_loader(parameter, weight)
        return {name} if self.says else None


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What vLLM logs of layers."""
    from vllm.model_executor.model_loader.reload import layerwise

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    layerwise.logger.addHandler(handler)
    yield texts
    layerwise.logger.removeHandler(handler)


@pytest.mark.parametrize(("says", "warned"), [(True, []), (False, ["Table: Failed to load weights"])])
def test_a_layer_without_weights_is_no_failure_where_the_model_says_what_it_loaded(
    said: list[str], says: bool, warned: list[str]
) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from tidemill.inference.weight_loader import SharedMemoryTransfer

    transfer = SharedMemoryTransfer.__new__(SharedMemoryTransfer)  # without an engine around it
    transfer.model, transfer.model_config = Model(says=says), None
    record_metadata_for_reloading(transfer.model)
    transfer.load({"dense.weight": torch.full((2, 2), 3.0)})
    assert transfer.model.dense.weight.tolist() == [[3, 3], [3, 3]]
    assert [text for text in said if "Failed" in text] == warned


def test_a_load_that_breaks_off_leaves_no_version(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from tidemill.inference.weight_loader import SharedMemoryTransfer, UpdateInfo

    transfer = SharedMemoryTransfer.__new__(SharedMemoryTransfer)
    transfer.model, transfer.model_config = Model(says=True), None  # its layer is 2 x 2
    transfer.expected, transfer.tied, transfer.files = {"dense.weight": (3, 3)}, False, MappedWeights()
    record_metadata_for_reloading(transfer.model)
    for size, version in ((4, 0), (3, None)):  # the first one is refused before anything is loaded
        path = tmp_path / f"{size}.safetensors"
        nbytes = write_tensors(path, {"dense.weight": torch.full((size, size), 3.0)})
        with pytest.raises(Exception, match="does not fit" if size == 4 else "Attempted to load weight"):
            transfer.receive_weights(UpdateInfo(str(path), nbytes, 5))
        assert transfer.version == version
