"""Runs one way of turning a sharded checkpoint into one for everybody. Started by `offline.py`.

It loads what it needs, says so, waits, and then works by the clock: no method is timed loading Python code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from measuring import NOT_INSTALLED

Work = Callable[[], object]


def ours(source: Path, out: Path, dtype: str = "keep", fsync: str = "") -> Work:
    from fsdp_export.opening import open_checkpoint

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    is_alone = not dist.is_initialized()
    ranks, rank = ((0,), 0) if is_alone else (tuple(range(dist.get_world_size())), dist.get_rank())

    def work(*, is_rehearsal: bool = False) -> None:
        checkpoint = open_checkpoint(source, dtype=dtype, ranks=ranks, rank=rank)
        if not is_rehearsal:
            checkpoint.save(out, fsync=bool(fsync))

    work(is_rehearsal=True)
    return work


def dcp_to_torch_save(source: Path, out: Path) -> Work:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out.mkdir()
    return lambda: dcp_to_torch_save(source, out / "pytorch_model.bin")


def accelerate(source: Path, out: Path) -> Work:
    from accelerate.utils import merge_fsdp_weights

    return lambda: merge_fsdp_weights(str(source / "pytorch_model_fsdp_0"), str(out))


def verl(source: Path, out: Path) -> Work:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(source),
        target_dir=str(out),
        hf_model_config_path=str(source / "huggingface"),
    )
    return lambda: FSDPModelMerger(config).merge_and_save()


def main() -> None:
    name, source, out, signals, *rest = sys.argv[1:]
    folder, rank = Path(signals), os.environ.get("RANK", "0")
    try:
        work = globals()[name](Path(source), Path(out), *rest)
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    loaded = folder / f"loaded-{rank}"
    loaded.write_text(str(os.getpid()))
    loaded.rename(folder / f"ready-{rank}")
    while not (folder / "go").exists():
        time.sleep(0.001)
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    times = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    (folder / f"done-{rank}").write_text(json.dumps(times))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
