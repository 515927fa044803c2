"""What `torch.save` writes into a pickle for a DTensor: the local tensor, and how the full one lies on a mesh.

The classes that say so are private to torch and change. A mesh is a tensor of ranks up to torch 2.9, a layout over a
list of ranks since 2.10, and since 2.13 that layout is split by axes; placements are classes of Python up to 2.9 and of
C++ since. What they say of the tensor has stayed the same, and only that is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..spec import Mesh, Sharding
from .archive import is_possible
from .tensor_pickle import TENSOR_NAMES, TensorView
from .unpickle import Call, Kind, Names, Record, Refusal, is_count, is_counts

__all__ = ["STATE_NAMES", "DTensor", "DeviceMesh", "Meshes", "sharding_of"]

_DTENSOR, _OLD_DTENSOR = "DTensor", "DTensor before torch 2.5"
_Axis = list[tuple[int, int]]
_MAX_RANKS = 1 << 17
_MAX_RANKS_OF_MESHES = 1 << 20
_MAX_AXES = 64
_MAX_NAME_LENGTH = 40


@dataclass(frozen=True, slots=True)
class DTensor:
    """A DTensor as a rank has pickled it.

    Attributes:
        local: The local tensor.
        shape: The global shape.
        spec: The state of its `DTensorSpec`, unchecked.
        is_old: Whether torch before 2.5 pickled it, which did not say in which order axes cut the same dim.
    """

    local: TensorView
    shape: tuple[int, ...]
    spec: Mapping[str, object]
    is_old: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A mesh as a rank has pickled it.

    Attributes:
        mesh: Its ranks.
        names: The names of its axes; empty if it has none.
        saved_by: The rank that pickled it; None where it is not on the mesh, and torch before 2.11 does not say.
    """

    mesh: Mesh
    names: tuple[str, ...]
    saved_by: int | None

    def __str__(self) -> str:
        return f"mesh {self.mesh}" + (f" ({', '.join(self.names)})" if self.names else "")


class Meshes:
    """The meshes in the pickle of one rank: the DTensors of a model share few of them.

    Args:
        rank: The rank whose pickle it is.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._meshes: dict[Record, DeviceMesh] = {}
        self._num_ranks = 0

    @property
    def found(self) -> Collection[DeviceMesh]:
        """The meshes that DTensors were asked for."""
        return self._meshes.values()

    def mesh_of(self, dtensor: DTensor) -> DeviceMesh:
        """Return the mesh of a DTensor.

        Raises:
            ValueError: The pickle does not say, or not in a way that is understood.
        """
        record = dtensor.spec.get("mesh")
        if not isinstance(record, Record):
            raise ValueError("no mesh")
        if record not in self._meshes:
            mesh = self._read(_state(record, "DeviceMesh"))
            self._num_ranks += len(mesh.mesh.ranks)
            if self._num_ranks > _MAX_RANKS_OF_MESHES:
                raise ValueError("more meshes than can be")
            self._meshes[record] = mesh
        return self._meshes[record]

    def _read(self, state: Mapping[str, object]) -> DeviceMesh:
        saved_by = state.get("_rank")
        own_rank = saved_by if isinstance(saved_by, int) else self.rank
        tensor = state.get("mesh")
        if isinstance(tensor, TensorView):
            mesh = Mesh(_ranks(state.get("_flatten_mesh_list")), tensor.shape)
        else:
            mesh = _laid_out(_ranks(state.get("_flatten_rank_map")), _axes(state.get("_layout")), own_rank)
        if math.prod(mesh.shape) != len(mesh.ranks):
            raise ValueError(f"a mesh of {len(mesh.ranks)} ranks and shape {mesh}")
        names = state.get("mesh_dim_names", state.get("_mesh_dim_names"))
        names = names if isinstance(names, tuple) and len(names) == len(mesh.shape) else ()
        names = tuple(name[:_MAX_NAME_LENGTH] for name in names if isinstance(name, str))
        if not isinstance(saved_by, int):
            saved_by = _rank_at(mesh, state.get("_coordinate_on_dim"))
        ascending = mesh.ascending()
        if ascending is None:
            raise ValueError("a mesh whose process groups do not follow it")
        return DeviceMesh(ascending, names, saved_by)


def sharding_of(dtensor: DTensor, mesh: Mesh, name: str) -> Sharding:
    """Return how a DTensor lies on its mesh.

    Args:
        dtensor: The DTensor.
        mesh: Its mesh.
        name: Its name, for messages.

    Raises:
        SourceError: A placement is not `Shard`, `Replicate` or a `_StridedShard` that follows the mesh.
        ValueError: The pickle does not say, or not in a way that is understood.
    """
    records = dtensor.spec.get("placements")
    if not isinstance(records, tuple) or len(records) != len(mesh.shape):
        raise ValueError(f"no placement for every axis of mesh {mesh}")
    placements = [_placement(record, len(dtensor.shape)) for record in records]
    sharding = Sharding.from_placements(mesh, placements, name)
    if dtensor.is_old and len({dim for dim, _ in sharding.cuts}) < len(sharding.cuts):
        raise ValueError("a dim cut by two axes, whose order torch before 2.5 did not save")
    order = dtensor.spec.get("shard_order")
    if order is None:
        return sharding
    cuts = _cuts(order)
    if cuts == sharding.cuts:
        return sharding
    # The placements tell the order only where one of them is strided.
    if sorted(cuts) != sorted(sharding.cuts) or any(placement.kind == "_StridedShard" for placement in placements):
        raise ValueError("an order of shards that is not that of the placements")
    return Sharding(mesh, cuts)


@dataclass(frozen=True, slots=True)
class _Placement:
    """Stands in for a placement of torch."""

    kind: str
    dim: int | None
    split_factor: int

    def is_replicate(self) -> bool:
        return self.kind == "Replicate"

    def is_partial(self) -> bool:
        return self.kind == "Partial"

    def __str__(self) -> str:
        return self.kind


def _placement(record: object, num_dims: int) -> _Placement:
    if not isinstance(record, Record) or record.kind not in _PLACEMENTS:
        raise ValueError("a placement that is none")
    state = record.state if isinstance(record.state, dict) else {}
    dim, split_factor = state.get("dim"), state.get("split_factor", 1)
    if "Shard" not in record.kind:
        return _Placement(record.kind, None, 1)
    if not is_count(dim) or dim >= num_dims or not is_count(split_factor):
        shown = dim if dim is None or isinstance(dim, int) else f"of type {type(dim).__name__}"
        raise ValueError(f"a shard of dim {shown} of {num_dims}")
    return _Placement(record.kind, dim, split_factor)


def _cuts(order: object) -> tuple[tuple[int, int], ...]:
    cuts: list[tuple[int, int]] = []
    for entry in order if isinstance(order, tuple) and len(order) <= _MAX_AXES else [None]:
        if not isinstance(entry, _ShardOrderEntry) or not is_count(entry.dim) or not is_counts(entry.axes):
            raise ValueError("an order of shards that is none")
        cuts += [(entry.dim, axis) for axis in entry.axes]
    return tuple(sorted(cuts, key=lambda cut: cut[0]))


def _ranks(value: object) -> tuple[int, ...]:
    if not is_counts(value, _MAX_RANKS) or not value or len(set(value)) < len(value):
        raise ValueError("a mesh without its ranks")
    return value


def _axes(layout: object) -> list[_Axis]:
    """Return the sizes and strides of which every axis of a layout is made."""
    state = _state(layout, "_MeshLayout")
    if "axes" in state:
        axes = state["axes"]
        parts = [_state(axis, "_FlatLayout") for axis in axes] if isinstance(axes, tuple) else []
        pairs = [(part.get("shape"), part.get("stride")) for part in parts]
    else:
        shape, stride = (value if isinstance(value, tuple) else (value,) for value in map(state.get, _SHAPE))
        pairs = list(zip(shape, stride, strict=True))
    if len(pairs) > _MAX_AXES:
        raise ValueError(f"a mesh of {len(pairs):,} axes")
    return [list(zip(_flat(shape), _flat(stride), strict=True)) for shape, stride in pairs]


def _flat(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) else (value,)
    if not is_counts(values):
        raise ValueError("a mesh without a shape")
    return values


def _laid_out(ranks: tuple[int, ...], axes: Sequence[_Axis], own_rank: int) -> Mesh:
    """Return the mesh that a layout makes of a list of ranks: of those it could be, that with a rank's own."""
    parts = [part for axis in axes for part in axis if part[0] != 1]
    if not all(map(all, parts)) or math.prod(size for size, _ in parts) > len(ranks):
        raise ValueError("a layout larger than its mesh")
    own = ranks.index(own_rank) if own_rank in ranks else 0
    base = own - sum(own // stride % size * stride for size, stride in parts)
    steps = [
        [sum(steps) for steps in product(*(range(0, size * stride, stride) for size, stride in axis if size != 1))]
        for axis in axes
    ]
    places = [base + sum(offsets) for offsets in product(*steps)]
    if not all(0 <= place < len(ranks) for place in places):
        raise ValueError("a layout larger than its mesh")
    return Mesh(tuple(ranks[place] for place in places), tuple(map(len, steps)))


def _rank_at(mesh: Mesh, coordinate: object) -> int | None:
    if not isinstance(coordinate, (list, tuple)) or len(coordinate) != len(mesh.shape):
        return None
    index = 0
    for position, size in zip(coordinate, mesh.shape, strict=True):
        if not is_count(position) or position >= size:
            return None
        index = index * size + position
    return mesh.ranks[index]


def _state(record: object, kind: str) -> Mapping[str, object]:
    if isinstance(record, Record) and record.kind == kind and isinstance(record.state, dict):
        return record.state
    raise ValueError(f"no {kind}")


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    shape: object
    stride: object
    dtype: object


@dataclass(frozen=True, slots=True)
class _ShardOrderEntry:
    dim: object
    axes: object


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A DTensor before it gets its state."""

    shape: tuple[int, ...]
    is_old: bool


def _wrapper(kind: object, _dtype: object, shape: object, *_: object) -> _Wrapper:
    if not isinstance(kind, Kind) or kind.name not in {_DTENSOR, _OLD_DTENSOR}:
        raise ValueError("a wrapper of what is no DTensor")
    if not is_counts(shape) or not is_possible(shape):
        raise ValueError("a DTensor without a shape")
    return _Wrapper(shape, kind.name == _OLD_DTENSOR)


def _from_type(function: object, _kind: object, arguments: object, state: object) -> object:
    """Make the tensor that a function makes, and give it its state; attributes of a plain tensor are dropped."""
    if not isinstance(function, Call) or not isinstance(arguments, tuple):
        raise TypeError("a tensor of a function that is none")
    tensor = function.function(*arguments)
    if not isinstance(tensor, _Wrapper):
        return tensor
    parts = [part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
    local, spec = (next((part[key] for part in reversed(parts) if key in part), None) for key in _ATTRIBUTES)
    if not isinstance(local, TensorView):
        raise TypeError("a DTensor without a local tensor")
    return DTensor(local, tensor.shape, _state(spec, "DTensorSpec"), tensor.is_old)


def _parameter_with_state(data: object, *_: object) -> object:
    return data


def _size(values: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(values)


def _ignore(*_: object) -> None:
    """Stand in for devices and layouts of memory, which say nothing about what is in a tensor."""


_SHAPE = ("shape", "stride")
_ATTRIBUTES = ("_local_tensor", "_spec")
_PLACEMENTS = ("Shard", "_StridedShard", "Replicate", "Partial")
_SHARDED_TENSOR = Refusal(
    "a ShardedTensor of FSDP1",
    "Pass FSDP a device_mesh, which makes it save DTensors, or train with fully_shard (FSDP2)",
)
_META = Refusal("a tensor on the meta device, which has no values,", "Save it once its values are there")
_NEW, _OLD = "torch.distributed.tensor", "torch.distributed._tensor"
# Plain values beside the tensors, which `torch.load(weights_only=True)` makes too. Pickles write Python 2's name.
_PLAIN = ("bytearray", "complex", "set")

STATE_NAMES: Names = {
    **TENSOR_NAMES,
    "torch._utils._rebuild_parameter_with_state": Call(_parameter_with_state),
    "torch._utils._rebuild_wrapper_subclass": Call(_wrapper),
    "torch._utils._rebuild_meta_tensor_no_storage": _META,
    "torch._tensor._rebuild_from_type_v2": Call(_from_type),
    "torch.Tensor": Kind("Tensor"),
    "torch.nn.parameter.Parameter": Kind("Parameter"),
    "torch.Size": Call(_size),
    "torch.device": Call(_ignore),
    "torch.serialization._get_layout": Call(_ignore),
    "torch.distributed.device_mesh.DeviceMesh": Kind("DeviceMesh"),
    "torch.distributed._mesh_layout._MeshLayout": Kind("_MeshLayout"),
    "torch.distributed._mesh_layout._FlatLayout": Kind("_FlatLayout"),
    f"{_NEW}.DTensor": Kind(_DTENSOR),
    f"{_NEW}._dtensor_spec.DTensorSpec": Kind("DTensorSpec"),
    f"{_NEW}._dtensor_spec.TensorMeta": Call(_TensorMeta),
    f"{_NEW}._dtensor_spec.ShardOrderEntry": Call(_ShardOrderEntry),
    f"{_OLD}.api.DTensor": Kind(_OLD_DTENSOR),
    f"{_OLD}.placement_types.DTensorSpec": Kind("DTensorSpec"),
    f"{_OLD}.placement_types.TensorMeta": Call(_TensorMeta),
    **{f"{module}.placement_types.{kind}": Kind(kind) for module in (_NEW, _OLD) for kind in _PLACEMENTS},
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": _SHARDED_TENSOR,
    **{f"{module}.{name}": Call(_ignore) for module in ("builtins", "__builtin__") for name in _PLAIN},
    "_codecs.encode": Call(_ignore),
    "collections.Counter": Call(_ignore),
}
"""What the global names in the pickle of a state dict mean."""
