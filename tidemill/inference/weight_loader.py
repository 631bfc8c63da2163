"""The engine's end of a weight sync on one host: a vLLM weight transfer engine that maps a safetensors file.

vLLM finds it through the entry point group `vllm.general_plugins`, in every process that it starts. The file is on a
memory-backed file system and stays mapped, so that the one copy is the one into the model's parameters.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger

from tidemill.errors import SyncError
from tidemill.weights.safetensors_file import check_same, counted_shapes, folder_shapes
from tidemill.weights.tensor_files import MappedWeights

BACKEND = "tidemill_shared_memory"
FALSE_ALARM = "%s: Failed to load weights"
WORKER_EXTENSION = f"{__name__}.WorkerExtension"
logger = init_logger(__name__)


def register() -> None:
    """Make the backend known to vLLM; called once or more in every process of an engine."""
    # The factory refuses a name twice, and a forked process inherits what its parent registered.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryTransfer.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """No settings."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of `tidemill.protocols.WeightUpdate`."""

    path: str
    nbytes: int
    version: int


@contextlib.contextmanager
def without_false_alarms() -> Iterator[None]:
    """Drop vLLM's warnings that it "failed to load weights" of a layer.

    It warns at every version about layers without weights of their own, such as a table of rotary embeddings or a tied
    head. `repack_tied` finds the parameters that were really given no weight.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    def wanted(record: logging.LogRecord) -> bool:
        return record.msg != FALSE_ALARM

    layerwise.logger.addFilter(wanted)
    try:
        yield
    finally:
        layerwise.logger.removeFilter(wanted)


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads the weights of one version from a file, or none of them.

    vLLM splits an update into start, update and finish, and takes the model apart at the start. Here everything happens
    within the update: the file is checked before the model is taken apart, so that a wrong file changes nothing.

    Attributes:
        version: that the model holds; None after a load that broke off, when it holds tensors of two versions.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    version: int | None = 0

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # An update must have exactly the tensors of the folder that the model was loaded from.
        tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        self.expected = folder_shapes(Path(self.model_config.model), tied)
        self.tied = tied
        self.files = MappedWeights()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to: every update names its file."""

    def start_weight_update(self) -> None:
        """Nothing: `receive_weights` does everything."""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has done everything."""

    def shutdown(self) -> None:
        self.files.kept.clear()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check the file, then load it.

        Raises:
            SyncError: the file is missing, has another size or other tensors; the old weights are still in place.
            Exception: of vLLM, when the load breaks off; `version` is None then.
        """
        started = time.monotonic()
        path = Path(update_info.path)
        try:
            with self.files.reading(path, update_info.nbytes) as mapped:
                given = counted_shapes(
                    {name: tuple(tensor.shape) for name, tensor in mapped.tensors.items()}, self.tied
                )
                check_same(given, self.expected, f"version {update_info.version} in {path}")
                self.version = None
                self.load(mapped.tensors)
                self.version = update_info.version
        except OSError as error:
            raise SyncError(f"cannot read the weights of version {update_info.version} from {path}: {error}") from error
        logger.debug("version %s loaded in %.3f s", update_info.version, time.monotonic() - started)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load layer by layer: fresh parameters, vLLM's loaders, its post-processing, then into the old storage.

        vLLM packs weights for its kernels after loading. A plain copy into the parameters would not change the packed
        ones. The file is not used afterwards: vLLM has copied all of it.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = None
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                loaded = self.model.load_weights(iter(sorted(tensors.items())))
        finally:
            with contextlib.nullcontext() if loaded is None else without_false_alarms():
                finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None:
            self.repack_tied(parameters, loaded)

    def repack_tied(self, parameters: Mapping[str, torch.nn.Parameter], loaded: set[str]) -> None:
        """Pack the layers again that share their parameter with a loaded one: a tied head.

        vLLM skips them as "failed to load". On the CPU the head has a packed copy of its own, which would compute
        logits with the embedding of the first version.

        Raises:
            SyncError: a parameter was given no weight under any name.
        """
        fresh = {id(parameters[name]) for name in loaded & parameters.keys()}
        missing = parameters.keys() - loaded
        if lost := sorted(name for name in missing if id(parameters[name]) not in fresh):
            raise SyncError(f"{len(lost)} parameters of the engine were given no weight, such as {', '.join(lost[:5])}")
        for name in missing:
            layer = self.model.get_submodule(name.rpartition(".")[0])
            layer.quant_method.process_weights_after_loading(layer)


class WorkerExtension:
    """Methods that vLLM adds to its workers, for `collective_rpc`."""

    weight_transfer_engine: SharedMemoryTransfer

    def loaded_version(self) -> int | None:
        return self.weight_transfer_engine.version
