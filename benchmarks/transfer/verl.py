"""verl's `MessageQueue` actor behind lines of JSON, in the interpreter that has verl.

Started by `message_queue.py`. Of verl only the module of the queue is loaded, because the package itself imports torch.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import asdict
from types import ModuleType
from typing import Any

import ray

from transfer.load import Load, Timing, memory_bytes, read, transfer

MODULE = "verl/experimental/fully_async_policy/message_queue.py"


def load_queue_module() -> ModuleType:
    """The module, pickled by value because no worker can import it by its name."""
    (file,) = [file for file in importlib.metadata.files("verl") or () if str(file) == MODULE]
    spec = importlib.util.spec_from_file_location("verl_message_queue", file.locate())
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


class Peer:
    """Passes loads through verl's queue."""

    def __init__(self) -> None:
        self.verl = load_queue_module()

    async def start(self, capacity: int) -> tuple[Any, Any]:
        actor = self.verl.MessageQueue.remote(None, capacity)
        client = self.verl.MessageQueueClient(actor)
        await client.get_queue_size()  # it is up
        return actor, client

    async def transfer(self, load: Load) -> dict[str, Any]:
        actor, client = await self.start(load.capacity)

        async def take() -> list[int]:
            return [read((await client.get_sample())[0]) for _ in range(load.groups)]

        timing: Timing = await transfer(load.payloads(), load.producers, client.put_sample, take())
        ray.kill(actor)
        return asdict(timing)

    async def fill(self, load: Load) -> dict[str, int]:
        """Nobody takes: how many groups are there afterwards, and what memory they hold."""
        actor, client = await self.start(load.capacity)
        payloads, before = load.payloads(), memory_bytes()
        await asyncio.gather(*(client.put_sample(payload) for payload in payloads))
        held = memory_bytes() - before
        kept = await client.get_queue_size()
        ray.kill(actor)
        return {"kept": kept, "refused": 0, "held": held}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    peer = Peer()
    print(json.dumps({"verl": importlib.metadata.version("verl"), "ray": ray.__version__}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        method = {"transfer": peer.transfer, "fill": peer.fill}[command.pop("method")]
        print(json.dumps(asyncio.run(method(Load(**command)))), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
