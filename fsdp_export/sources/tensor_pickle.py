"""What `torch.save` writes into a pickle for a tensor: not its data, but how it lies in a storage kept elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike

import torch

from ..errors import SourceError
from .archive import is_possible
from .unpickle import Call, Names, Refusal, is_count, is_counts, unpickle

__all__ = ["TENSOR_NAMES", "TensorView", "dtype_names", "find_storage", "read_tensor"]

_QUANTIZED = Refusal("a tensor that torch quantized", "Save it as floating numbers: tensor.dequantize()")


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as a view of a storage.

    Attributes:
        storage_key: Name of the storage in the archive.
        storage_bytes: Bytes that it has.
        dtype: The dtype.
        offset: Elements of the storage before the first one.
        shape: The shape.
        strides: Elements from one index to the next, in every dim.
    """

    storage_key: str
    storage_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Elements of the storage up to the last one of the view."""
        if not math.prod(self.shape):
            return 0
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def check(self, *, file: str | PathLike[str], name: str) -> None:
        """Refuse a tensor, expanded for example, that is larger than the memory it stands for.

        Args:
            file: The file it is from, for messages.
            name: The tensor, for messages.

        Raises:
            SourceError: Elements share memory.
        """
        extent = 0
        for step, size in sorted(zip(self.strides, self.shape, strict=True)) if math.prod(self.shape) else ():
            if size > 1 and step <= extent:
                fix = "Save a copy of it: tensor.contiguous()"
                raise SourceError("a tensor whose elements share memory", name=name, file=file, fix=fix)
            extent += max(size - 1, 0) * step


def read_tensor(data: bytes, *, file: str | PathLike[str], name: str) -> TensorView:
    """Read the pickle of a single tensor.

    Args:
        data: The pickle.
        file: The file it is from, for messages.
        name: The tensor, for messages.

    Raises:
        UnsafeInputError: The pickle names what no tensor needs.
        SourceError: It is damaged, or holds something else.
    """
    tensor = unpickle(data, TENSOR_NAMES, file=file, name=name, persistent=find_storage)
    if not isinstance(tensor, TensorView):
        fix = "The files are of different saves; use another step"
        raise SourceError("a pickle without a tensor", name=name, file=file, fix=fix)
    tensor.check(file=file, name=name)
    return tensor


def dtype_names() -> Names:
    """Return the dtypes by the global names that stand for them in a pickle; not those of quantized tensors."""
    return {
        f"torch.{name}": _QUANTIZED if name.startswith(("qint", "quint")) else value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    }


@dataclass(frozen=True, slots=True)
class _StorageType:
    """The type of a storage; an untyped one has no dtype."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    num_bytes: int
    dtype: object


def find_storage(persistent_id: object) -> object:
    """Return what a persistent id in a pickle of tensors stands for, for `unpickle`."""
    match persistent_id:
        case ("storage", _StorageType(dtype), str(key), _, int(count)) if is_count(count):
            return _Storage(key, count * (dtype.itemsize if dtype else 1), dtype)
    raise ValueError("a persistent id that is no storage")


def _tensor_v2(storage: object, *arguments: object) -> TensorView:
    offset, shape, strides, _requires_grad, _hooks, metadata = (*arguments, None)[:6]
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    if metadata:
        raise ValueError("a tensor that is yet to be conjugated or negated")
    return _view(storage, offset, shape, strides)


def _tensor_v3(storage: object, *arguments: object) -> TensorView:
    offset, shape, strides, requires_grad, hooks, dtype, metadata = (*arguments, None)[:7]
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    return _tensor_v2(
        _Storage(storage.key, storage.num_bytes, dtype), offset, shape, strides, requires_grad, hooks, metadata
    )


def _view(storage: _Storage, offset: object, shape: object, strides: object) -> TensorView:
    dtype = storage.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    if not is_count(offset) or not is_counts(shape) or not is_counts(strides) or len(shape) != len(strides):
        raise ValueError("a tensor without a shape")
    if not is_possible(shape):
        raise ValueError("a shape larger than any tensor")
    return TensorView(storage.key, storage.num_bytes, dtype, offset, shape, strides)


def _parameter(data: object, _requires_grad: object, _hooks: object) -> object:
    return data


def _no_hooks() -> dict[str, object]:
    return {}


_STORAGE_DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
TENSOR_NAMES: Names = {
    "torch._utils._rebuild_tensor_v2": Call(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Call(_tensor_v3),
    "torch._utils._rebuild_parameter": Call(_parameter),
    "torch.storage.UntypedStorage": _StorageType(None),
    **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _STORAGE_DTYPES.items()},
    "collections.OrderedDict": Call(_no_hooks),
    **dtype_names(),
}
"""What the global names in the pickle of a tensor mean."""
