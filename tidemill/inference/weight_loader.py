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
HALF_LOADED = "the engine now holds two versions and must not go on"
logger = init_logger(__name__)


def register() -> None:
    """Make the backend known to vLLM; called once or more in every process of an engine."""
    # The factory refuses a name twice, and a forked process inherits what its parent registered.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryTransfer.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of `tidemill.protocols.WeightUpdate`."""

    path: str
    nbytes: int
    version: int


@contextlib.contextmanager
def without_false_alarms() -> Iterator[None]:
    """Do not log that vLLM "failed to load weights" of a layer.

    It says so at every version of layers that have none of their own, such as a table of rotary embeddings or a head
    that is tied. A parameter that was given no weight is known by what the model says it loaded, see `repack_tied`.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    def told(record: logging.LogRecord) -> bool:
        return record.msg != FALSE_ALARM

    layerwise.logger.addFilter(told)
    try:
        yield
    finally:
        layerwise.logger.removeFilter(told)


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads the weights of one version from a file, or none of them.

    vLLM splits an update into start, update and finish, and takes the model apart at the start. Here all of it happens
    within the update: the file is checked while the model is still whole, so that a wrong file changes nothing.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # A checkpoint and its engine are made of the same tensors: what the model was loaded from is what must come.
        tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        self.expected = folder_shapes(Path(self.model_config.model), tied)
        self.tied = tied
        self.files = MappedWeights()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to: every update names its file."""

    def start_weight_update(self) -> None:
        """Nothing yet, see the class."""

    def finish_weight_update(self) -> None:
        """Nothing left, see the class."""

    def shutdown(self) -> None:
        """Let go of the files."""
        self.files.kept.clear()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check the file, then load it.

        Raises:
            SyncError: the file is not there, has another size or other tensors, and the old weights are still in place;
                or `HALF_LOADED`, as its text says.
        """
        started = time.monotonic()
        path = Path(update_info.path)
        try:
            with self.files.reading(path, update_info.nbytes) as mapped:
                given = counted_shapes(
                    {name: tuple(tensor.shape) for name, tensor in mapped.tensors.items()}, self.tied
                )
                check_same(given, self.expected, f"version {update_info.version} in {path}")
                self.load_all(mapped.tensors)
        except OSError as error:
            raise SyncError(f"cannot read the weights of version {update_info.version} from {path}: {error}") from error
        logger.debug("version %s loaded in %.3f s", update_info.version, time.monotonic() - started)

    def load_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load, and say so where it breaks off in the middle.

        Raises:
            SyncError: `HALF_LOADED`.
        """
        try:
            self.load(tensors)
        except Exception as error:
            raise SyncError(f"{error!r}; {HALF_LOADED}") from error

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Layer by layer: fresh parameters, vLLM's loaders, its post-processing, and back into the old storage.

        Nothing of the file is used afterwards: vLLM has copied all of it into storage of its own.

        The detour is needed because vLLM packs weights for the kernels after loading; a plain copy into the
        parameters would leave the packed ones as they were.
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
        """Pack the layers again that share their parameter with one that was loaded: a tied head.

        vLLM leaves them alone as "failed to load", and on the CPU the head has a packed copy of its own, which would go
        on computing logits with the embedding of the first version.

        Args:
            parameters: the model's, each under all its names.
            loaded: names that were given a weight.

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
