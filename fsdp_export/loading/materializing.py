"""Memory for what is on the meta device, in place: identity, ties and the rest of the module stay.

Tables that no checkpoint holds, the angles of rotary embeddings say, are computed by what their module or model has
for that; see `initial_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..compat import offloaded_parameters, reset_shards
from ..conversion.live_twin import model_class
from ..errors import SourceError, listing

__all__ = ["initial_values", "materialize", "own_tensors", "tensors_on_meta"]

# What modules call that which computes their tables anew; parameters stand in for it on the meta device.
_METHODS = ("reset_buffers", "rope_init", "reset_parameters")


def tensors_on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module that have no memory, under each of their names."""
    named = (
        (f"{path}.{name}".removeprefix("."), tensor) for path, _, name, tensor in own_tensors(model) if tensor.is_meta
    )
    return dict(named)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield the parameters and buffers of a module: the path of the one that has it, that one, name and tensor."""
    for path, module in model.named_modules(remove_duplicate=False):
        for own in (module._parameters, module._buffers):  # noqa: SLF001  `named_buffers` says nothing of modules
            for name, tensor in own.items():
                if tensor is not None:
                    yield path, module, name, tensor


def initial_values(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Let modules compute tensors that they have on meta and no checkpoint holds. The module is not changed.

    Each is computed for a stand-in of its module, twice, in memory filled with other values: what then is the same was
    computed. A model of transformers is asked (`_init_weights`), then the module (`reset_parameters` and the like).

    Args:
        model: The module.
        names: The names of the tensors.

    Raises:
        SourceError: Nobody computes one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    values: dict[str, torch.Tensor] = {}
    for path in {name.rpartition(".")[0] for name in names}:
        wanted = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == path}
        for attempt in _attempts(modules, path):
            found = _computed(modules[path], wanted, attempt)
            values |= {f"{path}.{name}".removeprefix("."): value for name, value in found.items()}
            wanted -= found.keys()
            if not wanted:
                break
    unknown = [name for name in names if name not in values]
    if unknown:
        raise SourceError(
            "tensors on the meta device that no checkpoint holds and no module computes",
            found=listing(unknown),
            fix="Put them on a device before loading, or give their module a method reset_parameters() that does it",
        )
    return values


_Attempt = Callable[[Any], object]


def _attempts(modules: Mapping[str, nn.Module], path: str) -> Iterator[_Attempt]:
    """Yield what may compute the tables of a module, of its stand-in."""
    above = path
    while True:
        initialize = getattr(modules[above], "_init_weights", None)
        if callable(initialize):
            yield initialize
        if not above:
            break
        above = above.rpartition(".")[0]
    for method in _METHODS:
        if callable(getattr(modules[path], method, None)):
            yield lambda twin, method=method: getattr(twin, method)()  # type: ignore[misc]
    if hasattr(modules[path], "rope_init_fn"):
        yield _rotate


def _rotate(twin: Any) -> None:
    """Compute the angles of a rotary embedding of transformers 4."""
    angles, _ = twin.rope_init_fn(twin.config, torch.device("cpu"))
    twin.inv_freq.copy_(angles)


def _computed(module: nn.Module, wanted: Collection[str], attempt: _Attempt) -> dict[str, torch.Tensor]:
    """Return those tensors of a module that are computed, whatever was in their memory before."""
    results = []
    for value in (0, 1):
        twin = _stand_in(module, wanted, value)
        try:
            with torch.no_grad():
                attempt(twin)
        except Exception:  # noqa: BLE001  a method that is for something else; whoever is left is named
            return {}
        results.append({name: getattr(twin, name) for name in wanted})
    zeros, ones = results
    return {
        name: zeros[name]
        for name in wanted
        if isinstance(zeros[name], torch.Tensor)
        and zeros[name].shape == ones[name].shape
        and torch.equal(zeros[name], ones[name])
        and zeros[name].numel()
    }


def _stand_in(module: nn.Module, wanted: Collection[str], value: int) -> nn.Module:
    """Copy a module without its values, and with memory for some of its tensors."""
    twin: nn.Module = object.__new__(model_class(module))
    nn.Module.__init__(twin)
    parts = vars(twin)
    parts.update({name: part for name, part in vars(module).items() if name not in parts})
    for name, child in module._modules.items():  # noqa: SLF001  a method may fill what is in there
        parts["_modules"][name] = None if child is None else _stand_in(child, (), value)
    for kind in ("_parameters", "_buffers"):
        for name, tensor in getattr(module, kind).items():
            if tensor is None:
                parts[kind][name] = None
                continue
            device = "cpu" if name in wanted else "meta"
            copy = torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device=device)
            parts[kind][name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
    return twin


def materialize(model: nn.Module, device: torch.device, values: Mapping[str, torch.Tensor]) -> None:
    """Give memory to all tensors of a module that are on meta: where FSDP2 offloads, pinned host memory.

    Args:
        model: The module.
        device: Where the memory is, but for what FSDP2 offloads.
        values: Values of some, by name; that of others is not defined.
    """
    offloaded = {id(parameter) for parameter in offloaded_parameters(model)}
    on_meta = {id(tensor): tensor for tensor in tensors_on_meta(model).values()}
    if not on_meta:
        return
    by_id = {id(tensor): values[name] for name, tensor in tensors_on_meta(model).items() if name in values}
    for key, tensor in on_meta.items():
        place = torch.device("cpu") if key in offloaded else device
        with torch.no_grad():
            memory = torch.empty_like(tensor.detach(), device=place)
            if key in by_id:
                _fill(memory, by_id[key])
        new = nn.Parameter(memory, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
        del memory
        _replace(model, tensor, new)
    reset_shards(model)


def _fill(memory: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value, or of a DTensor this rank's part of it. Not collective."""
    if isinstance(memory, DTensor):
        mesh, placements = memory.device_mesh, memory.placements
        # Of a DTensor without a source rank every rank takes its part of its own value.
        part = distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
        memory, value = memory.to_local(), part.to_local()
    memory.copy_(value)


def _replace(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Put a tensor with memory in the place of one without: as the same object where torch can do that."""
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody holds on to what is inside of it
        for module in model.modules():
            for kind in ("_parameters", "_buffers"):
                own = getattr(module, kind)
                own.update({name: new for name, tensor in own.items() if tensor is old})
