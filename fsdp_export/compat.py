"""Private or version-dependent API: one small function each, tested for the feature and not for a version."""

from __future__ import annotations

import atexit
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor
from torch.multiprocessing import reductions

__all__ = [
    "all_gather_into",
    "before_threads_end",
    "connect",
    "default_store",
    "disown_shared_memory",
    "has_multi_get",
    "local_of",
    "pin",
    "sent_together",
    "share_memory",
    "unpin",
]

# The old name warns since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def default_store() -> Store:
    """Return the store through which the ranks of the default process group found each other.

    Raises:
        ValueError: There is no default process group.
    """
    store: Store = distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to it
    return store


def connect(store: Store, prefix: str) -> Store:
    """Return a connection of its own to a store, for keys of their own."""
    untyped: Any = store  # torch's stubs lack `clone`
    return PrefixStore(prefix, untyped.clone())


def has_multi_get(store: Store) -> bool:
    """Tell whether a store can read several keys at once."""
    untyped: Any = store  # torch's stubs lack `has_extended_api`
    return bool(untyped.has_extended_api())


def all_gather_into(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Gather equal shards of all ranks of a group into one tensor.

    Collective: every rank of the group must call this in the same order.

    Args:
        output: Receives the shards one after another along dim 0; contiguous, on the device of `shard`.
        shard: This rank's part; contiguous, of the same shape and dtype on every rank.
        group: The process group; None is the default one.
        async_op: Whether to return before the gather is done.

    Returns:
        The work to wait for if `async_op`, else None.
    """
    work: dist.Work | None = _all_gather(output, shard, group=group, async_op=async_op)
    return work


@contextmanager
def sent_together(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Send the collectives of a context with one kernel, at its end, where the backend can; none may need another.

    NCCL gathers large tensors a tenth faster so. Torch's own way to do it, `_coalescing_manager`, keeps their memory.
    """
    backend: Any = group._get_backend(device) if group is not None and device.type == "cuda" else None  # noqa: SLF001
    if not (hasattr(backend, "_group_start") and hasattr(backend, "_group_end")):
        yield
        return
    backend._group_start()  # noqa: SLF001
    try:
        yield
    finally:
        backend._group_end()  # noqa: SLF001


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the block of a DTensor that this rank holds, the same object every time where torch has it at hand.

    A plain tensor is returned itself. Call it under `no_grad`. `to_local` makes a view, which takes longer.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor.to_local()


def before_threads_end(call: Callable[[], None]) -> None:
    """Call something when the main thread has ended, while pools of threads still take work; `atexit` is too late.

    What is registered last is called first; the standard library's pools register themselves as they are imported.
    """
    untyped: Any = threading  # private, but the only way, in all of Python 3.9 to 3.14
    getattr(untyped, "_register_atexit", atexit.register)(call)


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pin host memory where it is, so that copies from a device neither wait nor go through other memory.

    Returns:
        Whether it is pinned now; false where the device has no such thing, or the system refuses.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        untyped: Any = torch.cuda.cudart
        status = untyped().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return int(status) == 0


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`. No copy may be under way."""
    untyped: Any = torch.cuda.cudart
    untyped().cudaHostUnregister(memory.data_ptr())


def share_memory(memory: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Return what another process on the same GPU calls, and with what, to see memory of this one."""
    function, arguments = reductions.reduce_tensor(memory)  # type: ignore[no-untyped-call]
    return function, arguments


def disown_shared_memory(handle: tuple[Callable[..., torch.Tensor], tuple[Any, ...]]) -> None:
    """Let memory of `share_memory` be freed here even if the other process never says that it has dropped it.

    Torch counts its readers in a file, and keeps the memory of those that died. One that still says so does no harm.
    """
    parameters = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    known = dict(zip(parameters, handle[1], strict=False))
    release = getattr(known.get("storage_cls"), "_release_ipc_counter", None)
    if release is not None:
        release(known["ref_counter_handle"], known["ref_counter_offset"], device=known["storage_device"])
