"""A script that ends right after an asynchronous save into a folder that it is given."""

import sys
import time

import torch.distributed as dist
from faults import before_call, layered
from models import shard

from fsdp_export import save_checkpoint
from fsdp_export.sinks.files import FileSink

dist.init_process_group("gloo")
rank = dist.get_rank()
# Until long after the end of the script.
before_call(FileSink, "write", lambda: time.sleep(0.5))
save_checkpoint(shard(layered(), "1d", 2), sys.argv[1], blocking=False)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    raise RuntimeError("the script ends")
time.sleep(0.2)
sys.exit(3)
