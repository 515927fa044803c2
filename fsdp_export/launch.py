"""Joining the other processes of a launcher: torchrun, srun."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from .errors import RankError, UsageError

__all__ = ["Group", "joined_group", "launched_ranks", "speaks"]

_log = logging.getLogger("fsdp_export")
_TIMEOUT = timedelta(minutes=10)
_WARNING_SECONDS = 5.0
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How many processes a launcher started, and which one this is.
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
# Below the ports that systems give away by themselves.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True, slots=True)
class Group:
    """The processes that export together.

    Attributes:
        ranks: Their global ranks.
        rank: This process's.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0

    @property
    def is_lead(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == self.ranks[0]

    def is_first_to(self, deed: str) -> bool:
        """Tell whether no other process asked this before. Not collective, so that it works when one is dead."""
        if len(self.ranks) == 1:
            return True
        from .compat import default_store

        try:
            return default_store().add(f"fsdp_export/{deed}", 1) == 1
        except (RuntimeError, ValueError):  # whoever hosts the store is gone: better twice than not at all
            return True


def launched_ranks(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Find out which rank of how many this process is.

    Args:
        environ: The environment.

    Returns:
        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed reads them; None for a process alone.

    Raises:
        UsageError: A launcher started several processes, but not so that they can find each other.
    """
    if all(environ.get(name) for name in _RENDEZVOUS):
        return {name: environ[name] for name in _RENDEZVOUS} if _number(environ, "WORLD_SIZE", 1) > 1 else None
    size, rank = _SLURM
    num_tasks = _number(environ, size, 1)
    if num_tasks > 1 and rank in environ:
        address, port = _slurm_address(environ), environ.get("MASTER_PORT") or _slurm_port(environ)
        return dict(zip(_RENDEZVOUS, (environ[rank], str(num_tasks), address, port), strict=True))
    for name in (*(size for size, _ in _MPI), "WORLD_SIZE"):
        if _number(environ, name, 1) > 1:
            raise UsageError(
                f"{environ[name]} processes were started ({name}) that did not join a group: each would write all",
                fix="Use torchrun --nproc-per-node N -m fsdp_export ..., or start one process without that variable",
            )
    return None


def speaks(environ: Mapping[str, str]) -> bool:
    """Tell whether this process, of those that a launcher started, says what holds for all, before they have joined.

    Where it is not certain that there are others, it does.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return environ.get("RANK", "0") == "0"
    return all(environ.get(rank, "0") == "0" for size, rank in (_SLURM, *_MPI) if size in environ)


@contextmanager
def joined_group() -> Iterator[Group]:
    """Join the processes that a launcher started, for the time of the command.

    Yields:
        The group; of this process alone if it was started alone.

    Raises:
        UsageError: As `launched_ranks`.
        RankError: Not all of them came.
    """
    ranks = launched_ranks(os.environ)
    if ranks is None:
        yield Group()
        return
    import torch.distributed as dist

    os.environ.update(ranks)
    _meet()
    try:
        yield Group(tuple(range(dist.get_world_size())), dist.get_rank())
    finally:
        dist.destroy_process_group()


def _meet() -> None:
    import torch.distributed as dist

    rank, size, address, port = (os.environ[name] for name in _RENDEZVOUS)
    where = f"rank {rank} of {size} at {address}:{port}"
    fix = "Start all of them, or unset WORLD_SIZE to run alone"
    timer = threading.Timer(_WARNING_SECONDS, _log.warning, ("%s waits for the others. %s.", where, fix))
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RankError(f"{where} did not meet the others", found=reason, fix=fix) from None
    finally:
        timer.cancel()


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Return where the first task runs."""
    if address := environ.get("MASTER_ADDR"):
        return address
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        # node[01-04,07],login1: the first of every bracket, then the first of all.
        return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]
    raise UsageError(
        f"srun started {environ[_SLURM[0]]} processes that cannot find each other",
        fix="Set MASTER_ADDR to the first node, or use torchrun",
    )


def _slurm_port(environ: Mapping[str, str]) -> str:
    """Return a port that all tasks of a step choose, and those of another step hardly ever."""
    step = _number(environ, "SLURM_JOB_ID", 0) + _number(environ, "SLURM_STEP_ID", 0)
    return str(_FIRST_PORT + step % _NUM_PORTS)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is no number", found=repr(text), fix=f"Unset {name}")
    return int(text)
