"""Private or version-dependent API: one small function each, tested for the feature and not for a version."""

from __future__ import annotations

import atexit
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor
from torch.multiprocessing import reductions

__all__ = [
    "all_gather_into",
    "before_threads_end",
    "broadcast",
    "connect",
    "default_store",
    "disown_shared_memory",
    "has_multi_get",
    "layout_of",
    "local_of",
    "new_backend",
    "offloaded_parameters",
    "pin",
    "reset_shards",
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


def layout_of(tensor: torch.Tensor) -> object:
    """Return what says how a DTensor lies on its mesh, the same object as long as it is the same; None for others."""
    if not isinstance(tensor, DTensor):
        return None
    return getattr(tensor, "_spec", None) or (tensor.device_mesh, tensor.placements)


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


def new_backend(kind: str, store: Store, rank: int, num_ranks: int, *, name: str, timeout: timedelta) -> Any:
    """Return this process's part of a process group that torch.distributed knows nothing of.

    The others make theirs with torch's `_new_process_group_helper`, whose keys these are. It does not serve here: it
    splits the communicator off a default group that is bound to its device, which all ranks of that one have to do.

    Args:
        kind: `"nccl"` or `"gloo"`.
        store: What they find each other by.
        rank: Of this process.
        num_ranks: How many there are.
        name: Of the group.
        timeout: After which one that is late is an error, with gloo; when NCCL ends the process, if nobody aborts.

    Raises:
        RuntimeError: This torch has no such backend.
    """
    classes: Any = distributed_c10d
    store = PrefixStore(f"{'cuda' if kind == 'nccl' else 'cpu'}/", PrefixStore(f"{name}/", store))
    if kind == "gloo":
        return classes.ProcessGroupGloo(store, rank, num_ranks, timeout)
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    options = classes.ProcessGroupNCCL.Options()
    options.group_name, options._timeout = name, timeout  # noqa: SLF001  so does torch itself
    # Else its watchdog ends this process when another one dies. Each group reads this once, as it is made.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return classes.ProcessGroupNCCL(store, rank, num_ranks, options)


def broadcast(backend: Any, tensor: torch.Tensor) -> dist.Work:
    """Begin to send a tensor from rank 0 to all others of what `new_backend` returned."""
    options: Any = distributed_c10d.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, True
    work: dist.Work = backend.broadcast([tensor], options)
    return work


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def offloaded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose shards FSDP2 keeps in host memory."""
    return [shard.sharded_param for shard in _fsdp_shards(model) if getattr(shard, "offload_to_cpu", False)]


def reset_shards(model: nn.Module) -> None:
    """Let FSDP2 take up memory that its parameters got, as it does after `to_empty`: it pads it, and pins it."""
    with torch.no_grad():
        for shard in _fsdp_shards(model):
            shard.reset_sharded_param()


def _fsdp_shards(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of every parameter; private, and several groups a module since torch 2.12."""
    for module in model.modules():
        get_state: Any = getattr(module, "_get_fsdp_state", None)  # to import FSDP2 takes half a second
        if get_state is not None:
            state = get_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):  # noqa: SLF001
                yield from group.fsdp_params
