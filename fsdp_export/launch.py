"""Joining the other processes of a launcher: torchrun, srun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from .errors import UsageError

__all__ = ["joined_group", "launched_ranks"]

_TIMEOUT = timedelta(minutes=10)


def launched_ranks(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Find out which rank of how many this process is.

    Args:
        environ: The environment.

    Returns:
        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed reads them; None for a process alone.

    Raises:
        UsageError: A launcher started several processes, but not so that they can find each other.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in environ for name in wanted):
        return {name: environ[name] for name in wanted} if int(environ["WORLD_SIZE"]) > 1 else None
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks > 1 and "SLURM_PROCID" in environ:
        one_node = environ.get("SLURM_STEP_NUM_NODES") == "1"
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else None)
        if address is not None:
            job = int(environ.get("SLURM_JOB_ID", "0"))
            port = environ.get("MASTER_PORT", str(20_000 + job % 20_000))
            return dict(zip(wanted, (environ["SLURM_PROCID"], str(num_tasks), address, port), strict=True))
        raise UsageError(
            f"srun started {num_tasks} processes on several nodes, which cannot find each other",
            fix="Set MASTER_ADDR to the first node, or use srun with torchrun",
        )
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        if int(environ.get(name, "1")) > 1:
            raise UsageError(
                f"{environ[name]} processes were started ({name}) that did not join a group: each would write everything",
                fix="Use torchrun --nproc-per-node N -m fsdp_export ..., or start one process",
            )
    return None


@contextmanager
def joined_group() -> Iterator[tuple[tuple[int, ...], int]]:
    """Join the processes that a launcher started, for the time of the command.

    Yields:
        All ranks, and this process's.

    Raises:
        UsageError: As `launched_ranks`.
    """
    ranks = launched_ranks(os.environ)
    if ranks is None:
        yield (0,), 0
        return
    import torch.distributed as dist

    os.environ.update(ranks)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield tuple(range(dist.get_world_size())), dist.get_rank()
    finally:
        dist.destroy_process_group()
