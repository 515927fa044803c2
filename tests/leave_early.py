"""A script that leaves a process group right after a save, and ends in the middle of an export: RANK FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from faults import layered
from models import shard
from torch import nn

from fsdp_export import Exporter, save_checkpoint
from fsdp_export.errors import ExportError

rank, folder = int(sys.argv[1]), Path(sys.argv[2])


def sharded_in_a_group(number: int) -> nn.Module:
    store = f"file://{folder}/store-{number}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    return shard(layered(), "1d", 2)


save_checkpoint(sharded_in_a_group(1), folder / "export")
dist.destroy_process_group()
tensors = iter(Exporter(sharded_in_a_group(2), bucket_bytes=256).tensors())
next(tensors)
if rank == 1:
    # As where an error ends a program: nobody closes the loop, and nobody leaves the group.
    sys.exit("the script ends")
try:
    for _ in tensors:
        pass
except ExportError as error:
    print(error)
dist.destroy_process_group()
