"""A live module, sharded by FSDP2 or not. It is never moved, and nothing of it is gathered to learn a name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from ..compat import layout_of
from ..errors import PlanError, SourceError, UsageError, listing
from ..gather import Groups
from ..names import strip_wrappers
from ..spec import Mesh, Sharding, TensorSpec
from .live_blocks import Entry, Form, local_block
from .structure import Structure

__all__ = ["LiveSource", "find_ranks", "named_tensors"]

_log = logging.getLogger("fsdp_export")


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module under their clean names.

    Tied parameters stand under each of their names as one and the same object. Under FSDP2 this reshards what a
    forward left unsharded, as every `state_dict()` does. Not collective.

    Raises:
        SourceError: The module holds FSDP1 modules, whose state dict is a flat shard or a gather.
        PlanError: Two names become one when the segments of wrappers leave them.
    """
    for kind in {type(module) for module in model.modules()}:
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in kind.__mro__):
            name = next(name for name, module in model.named_modules() if type(module) is kind)
            fix = "Wrap the model with fully_shard (FSDP2) instead"
            raise SourceError("an FSDP1 module, whose shards are flat", name=name or type(model).__name__, fix=fix)
    wrappers = ddp_modules(model)
    tensors: dict[str, torch.Tensor] = {}
    for raw_name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        name = strip_wrappers(raw_name, wrappers)
        if name in tensors:
            raise PlanError("two names become one without the segments of wrappers", name=name, found=raw_name)
        tensors[name] = value
    return tensors


def find_ranks(model: nn.Module, tensors: Mapping[str, torch.Tensor] | None = None) -> tuple[tuple[int, ...], int]:
    """Return the global ranks that hold a module, ascending, and this process's rank. Local.

    They are the ranks of its largest mesh, else of its DDP group, else of the default group.

    Args:
        model: The module.
        tensors: Its `named_tensors`, if they are at hand.

    Raises:
        SourceError: As `named_tensors`.
    """
    if not dist.is_initialized():
        return (0,), 0
    rank = dist.get_rank()
    mesh = _largest_mesh((tensors if tensors is not None else named_tensors(model)).values())
    if mesh is not None:
        return tuple(sorted(mesh.mesh.flatten().tolist())), rank
    ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
    return tuple(sorted(dist.get_process_group_ranks(ddp.process_group if ddp is not None else None))), rank


def _largest_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    # By identity: to compare or to measure a mesh takes longer than all else that is done for a tensor.
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return max(meshes.values(), key=lambda mesh: mesh.mesh.numel(), default=None)


def ddp_modules(model: nn.Module) -> list[str]:
    """Return the names of the DDP modules in a module."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if isinstance(module, DistributedDataParallel)]


class LiveSource:
    """The parameters and persistent buffers of a module, read where they are between `refresh` and `close`.

    Values alias the module's memory: what an optimizer step changes during an export changes the export.

    Args:
        model: The module. Its state dict is taken with `keep_vars=True`, which keeps the identity of tied parameters
            and touches no storage, so that a half moved module can be read as well.
        state_dict: Other values for the same names, for example an EMA: DTensors, or local tensors of the shapes of
            the module's own local tensors.
        aliases: Names to leave out, and the name under which the same tensor is exported.
        device: Where tensors are gathered and converted; default: this rank's device of the mesh, else that of the
            module.
        may_be_meta: Whether tensors may be without data, since it is told only how they lie on the ranks.

    Raises:
        SourceError: A tensor cannot be exported: on meta, Partial, a mesh that lacks some of the ranks, a tensor
            subclass.
        UsageError: `state_dict` lacks a name, or has a tensor of another shape under it.
    """

    folder: Path | None = None
    is_concurrent = False

    def __init__(
        self,
        model: nn.Module,
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        aliases: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        may_be_meta: bool = False,
    ) -> None:
        self._model, self._values, self._aliases = model, state_dict, dict(aliases or {})
        self._may_be_meta = may_be_meta
        self._is_warned = False
        self._meshes: dict[DeviceMesh, tuple[Mesh, tuple[int, ...]]] = {}
        self._device_mesh: DeviceMesh | None
        self._groups: dict[tuple[Mesh, int], dist.ProcessGroup] = {}
        self.groups: Groups = self._groups
        own = named_tensors(model)
        self.ranks, self.rank = find_ranks(model, own)
        self._replicated = Sharding.replicated(self.ranks)
        self._forms: dict[object, Form] = {}
        self._locals: dict[str, torch.Tensor] = {}
        found = [(entry, block.device) for entry, block in self._read(own)]
        self._entries, self._structure = [entry for entry, _ in found], Structure(model)
        self.specs = tuple(entry.spec for entry in self._entries)
        self.copies = tuple(entry.spec for entry in self._entries if entry.form.is_copy)
        others = [
            name for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, torch.Tensor)
        ]
        if others:
            _log.warning("not tensors, and not exported: %s", listing(others))
        device_mesh = self._device_mesh
        self.device = device or _device(device_mesh, (device for _, device in found))
        where = "whole" if device_mesh is None else f"on {device_mesh.device_type} mesh {self._on_mesh(device_mesh)[0]}"
        name = type(model).__name__.removeprefix("FSDP")
        self.description = f"live {name}, {len(self.specs):,} tensors, {where}"

    def refresh(self) -> None:
        """Read the module anew: its tensors may have been replaced since.

        Raises:
            SourceError: Names, shapes, dtypes, shardings or ties are not those that were planned.
        """
        if self._values is None and self._structure.is_unchanged() and self._reread():
            return
        found = list(self._read(named_tensors(self._model)))
        specs = tuple(entry.spec for entry, _ in found)
        changed = set(specs) ^ set(self.specs) if specs != self.specs else None
        if changed:
            names = listing({spec.name for spec in changed})
            raise SourceError(f"the module is not the one that was planned: {names} changed", fix="Make a new Exporter")
        self._entries, self._structure = [entry for entry, _ in found], Structure(self._model)
        self._locals = {entry.spec.name: block for entry, block in found}

    def close(self) -> None:
        """Forget the module's memory, which may be freed now: training often moves it away between two walks."""
        self._locals = {}

    def rows(self, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        """Return rows of this rank's block, without copying; see `Source.rows`."""
        local = self._locals[spec.name]
        if not spec.shape or stop - first == len(local):
            return local
        begin = spec.sharding.box(spec.shape, self.rank).start[0] if spec.sharding.cuts else 0
        return local[first - begin : stop - begin]

    def extents(self, spec: TensorSpec, first: int, stop: int) -> None:
        """Return None: rows are in memory."""

    def _reread(self) -> bool:
        """Read the tensors of a module that is unchanged; tell whether each is what it was when it was read last."""
        locals_ = {}
        with torch.no_grad():
            for entry in self._entries:
                block = entry.block(self._structure.tensor(entry.identity))
                if block is None:
                    return False
                locals_[entry.spec.name] = block
        self._locals = locals_
        return True

    def _read(self, own: dict[str, torch.Tensor]) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield what there is to know of every tensor, and this rank's block."""
        self._device_mesh = _largest_mesh(own.values())
        for alias, name in self._aliases.items():
            if own.pop(alias, None) is not own.get(name):
                what = f"the module is not the one that was planned: {alias} is not tied to {name} any more"
                raise SourceError(what, fix="Make a new Exporter")
        values = own if self._values is None else self._replaced(own, self._values)
        buffers = {name for name, value in own.items() if not isinstance(value, nn.Parameter)}
        with torch.no_grad():
            for name, value in values.items():
                local = local_block(name, value, may_be_meta=self._may_be_meta)
                form = self._form(name, value)
                block = form.block(local)
                if block is None:
                    what, found = "a local tensor of another shape", tuple(local.shape)
                    raise SourceError(what, name=name, expected=form.local_shape, found=found)
                spec = TensorSpec(name, form.shape, local.dtype, form.sharding, name in buffers)
                yield Entry(spec, form, id(value), layout_of(value)), block

    def _replaced(self, own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put given values in the place of the module's own."""
        given: dict[str, object] = {}
        wrappers = ddp_modules(self._model)
        for raw_name, value in values.items():
            name = strip_wrappers(raw_name, wrappers)
            if name in given:
                raise UsageError("two names in state_dict become one", name=name, found=raw_name)
            given[name] = value
        for alias, name in self._aliases.items():
            if alias in given:
                given.setdefault(name, given.pop(alias))
        unused = given.keys() - own.keys()
        if unused and not self._is_warned:
            self._is_warned = True
            _log.warning("state_dict has names that the module lacks; they are not exported: %s", listing(unused))
        return {name: _replacement(name, tensor, given.get(name)) for name, tensor in own.items()}

    def _form(self, name: str, value: torch.Tensor) -> Form:
        device_mesh = value.device_mesh if isinstance(value, DTensor) else None
        key = (id(device_mesh), value.placements, value.shape) if isinstance(value, DTensor) else value.shape
        form = self._forms.get(key)
        if form is None:
            shape, (sharding, is_copy) = tuple(value.shape), self._sharding(name, value)
            form = Form(shape, sharding, is_copy, sharding.box(shape, self.rank).shape, device_mesh)
            self._forms[key] = form
        return form

    def _sharding(self, name: str, value: torch.Tensor) -> tuple[Sharding, bool]:
        """Return how a tensor lies on the ranks, and whether nothing keeps its copies equal."""
        if not isinstance(value, DTensor):
            return self._replicated, len(self.ranks) > 1
        mesh, axes = self._on_mesh(value.device_mesh, name)
        own = dict(zip(axes, value.placements, strict=True))
        everywhere = [own.get(axis, Replicate()) for axis in range(len(mesh.shape))]
        return Sharding.from_placements(mesh, everywhere, name), len(axes) < len(mesh.shape)

    def _on_mesh(self, device_mesh: DeviceMesh, name: str | None = None) -> tuple[Mesh, tuple[int, ...]]:
        """Return a mesh of all ranks, and which of its axes are those of a device mesh.

        Under FSDP + TP, what TP leaves alone lies on the FSDP axis only, with a copy on every rank of the TP axis.
        """
        found = self._meshes.get(device_mesh)
        if found is None:
            mesh = _ordered_mesh(device_mesh, name)
            if set(mesh.ranks) == set(self.ranks):
                found = mesh, tuple(range(len(mesh.shape)))
                for axis, size in enumerate(mesh.shape):
                    if size > 1:
                        self._groups[mesh, axis] = device_mesh.get_group(axis)
            else:
                found = self._within_largest(mesh, name)
            self._meshes[device_mesh] = found
        return found

    def _within_largest(self, mesh: Mesh, name: str | None) -> tuple[Mesh, tuple[int, ...]]:
        if self._device_mesh is not None and self.rank in mesh.ranks:
            whole, _ = self._on_mesh(self._device_mesh, name)
            for axes in combinations(range(len(whole.shape)), len(mesh.shape)):
                if whole.along(axes, self.rank) == mesh:
                    return whole, axes
        raise SourceError(
            "a mesh that does not have all ranks of the export",
            name=name,
            expected=f"ranks {listing(self.ranks)}",
            found=f"ranks {listing(mesh.ranks)}",
            fix="Export modules with different meshes (pipeline stages, say) one by one",
        )


def _ordered_mesh(device_mesh: DeviceMesh, name: str | None) -> Mesh:
    ranks = device_mesh.mesh
    mesh = Mesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape)).ascending()
    if mesh is None:
        raise SourceError(
            "a mesh whose process groups do not follow it",
            name=name,
            expected="ranks in the same order in every row",
            found=ranks.tolist(),
            fix="Make the device mesh of ascending ranks",
        )
    return mesh


def _replacement(name: str, own: torch.Tensor, value: object) -> torch.Tensor:
    if value is None:
        raise UsageError("no value in state_dict", name=name, fix="Give a value for every name of the module")
    if not isinstance(value, torch.Tensor):
        raise UsageError("no tensor in state_dict", name=name, found=type(value).__name__)
    expected = own.shape
    if isinstance(own, DTensor) and not isinstance(value, DTensor):
        with torch.no_grad():
            expected = own.to_local().shape
            if value.shape == expected:
                mesh, placements = own.device_mesh, own.placements
                return DTensor.from_local(
                    value, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
                )
    if value.shape != expected:
        what = "a value of another shape in state_dict"
        raise UsageError(what, name=name, expected=tuple(expected), found=tuple(value.shape))
    return value


def _device(device_mesh: DeviceMesh | None, devices: Iterable[torch.device]) -> torch.device:
    if device_mesh is not None and device_mesh.device_type == "cpu":
        return torch.device("cpu")
    if device_mesh is not None:
        return torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())
    return next((device for device in devices if device.type not in {"cpu", "meta"}), torch.device("cpu"))
