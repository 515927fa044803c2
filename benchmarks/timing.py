"""One run of something on all ranks: how long it took, what memory, and what went through system calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from measuring import Peak, read_bytes, unbacked_bytes, written_bytes

__all__ = ["in_turn", "timed"]

Figures = dict[str, list[dict[str, float]]]


def timed(run: Callable[[], object], *, empties_cache: bool = True) -> dict[str, float]:
    """Run something once. Figures are those of the worst rank, `written_bytes` the sum. Collective.

    Args:
        run: What is timed, until the GPU has done it too.
        empties_cache: Whether memory that torch keeps on the GPU is given back first.
    """
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.synchronize()
        if empties_cache:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    device_before = torch.cuda.memory_allocated() if is_cuda else 0
    host_before, read_before, written_before = unbacked_bytes(), read_bytes(), written_bytes()
    with Peak(lambda: unbacked_bytes() - host_before) as host:
        started = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    device_bytes = torch.cuda.max_memory_allocated() - device_before if is_cuda else 0
    worst = torch.tensor([seconds, host.value, device_bytes, read_bytes() - read_before], dtype=torch.float64)
    written = torch.tensor([written_bytes() - written_before], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(written)
    dist.barrier()
    keys = ("seconds", "host_bytes", "device_bytes", "read_bytes")
    return {**dict(zip(keys, worst.tolist(), strict=True)), "written_bytes": written.item()}


def in_turn(
    names: Sequence[str], repeats: int, measure: Callable[[str], dict[str, float]], report: Callable[[Figures], None]
) -> None:
    """Measure all methods in turn, and that several times; the first rank reports after every turn. Collective."""
    figures: Figures = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            figures[name].append(measure(name))
            if dist.get_rank() == 0:
                print(f"{name}: {figures[name][-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            report(figures)
