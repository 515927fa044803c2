"""A worker on a GPU that takes part in updates: FOLDER RANK DEVICE. tests/test_gpu_ipc.py starts one for each rank.

Files in the folder: `update-N.json` has the addresses, `done-N-R` is what came of it on a rank, `weights-N-R.pt` are
its weights. If `discard` is there, they are copied on the GPU and forgotten; `fault-R` kills the worker at its second
bucket, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from ipc_engine import serve_minimal

Bucket = list[tuple[str, torch.Tensor]]


def serve(address: str, load: Callable[[Bucket], None], finish: Callable[[], None], device: int) -> str:
    """Take part in an update, and tell whose code did."""
    try:
        from checkpoint_engine.worker import update_weights_from_ipc
    except ImportError:
        serve_minimal(address, load, finish, device)
        return "a minimal worker"
    update_weights_from_ipc(zmq.Context.instance(), address, device, run=load, post_hook=finish)
    return "checkpoint-engine's worker"


class Update:
    """What one update brings."""

    def __init__(self, folder: Path, rank: int, scratch: torch.Tensor) -> None:
        self._fault = folder / f"fault-{rank}"
        self._is_discarding = (folder / "discard").exists()
        self._num_buckets = 0
        self.scratch = scratch
        self.weights: dict[str, torch.Tensor] = {}

    def load(self, bucket: Bucket) -> None:
        self._num_buckets += 1
        if self._num_buckets == 2 and self._fault.exists():
            self._fault.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        for name, tensor in bucket:
            if self._is_discarding:
                self._discard(tensor)
            else:
                self.weights[name] = tensor.to("cpu", copy=True)

    def _discard(self, tensor: torch.Tensor) -> None:
        if self.scratch.numel() < tensor.nbytes:
            self.scratch = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        self.scratch[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))


def write(path: Path, content: Any) -> None:
    """Write a file that appears as a whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content))
    part.rename(path)


def main(folder: Path, rank: int, device: int) -> None:
    torch.cuda.set_device(device)
    key = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    number = len(list(folder.glob("update-*.json")))
    (folder / f"ready-{rank}").touch()
    while True:
        number += 1
        while not (folder / f"update-{number}.json").exists():
            time.sleep(0.002)
        address = json.loads((folder / f"update-{number}.json").read_text())[key]
        update = Update(folder, rank, scratch)
        try:
            outcome = {"error": "", "what": serve(address, update.load, lambda: None, device)}
        except Exception:  # noqa: BLE001  the server answers with it
            outcome = {"error": traceback.format_exc(), "what": ""}
        torch.save(update.weights, folder / f"weights-{number}-{rank}.pt")
        scratch = update.scratch
        write(folder / f"done-{number}-{rank}", outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
