"""To which dtype a floating tensor is cast. Integers, booleans and packed floats (fp8, fp4) are never cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .errors import UsageError
from .spec import TensorInfo

__all__ = ["HALF_DTYPES", "Casts", "DtypePolicy", "are_cast", "model_dtype", "scales_of_packed"]

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that classes keep some of their parameters from."""

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Weights are packed into fp8, fp4 and integers of up to 32 bits; indices and counters have 64.
_UNPACKED_BYTES = 8
_MOST_WORDS = 4
_SCALES = frozenset({"absmax", "scale", "scales", "zeros"})


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """What becomes of a tensor's dtype.

    Attributes:
        target: What floating tensors are cast to; None to keep every dtype.
        only_narrow: Whether tensors that are no wider than the target keep their dtype.
    """

    target: torch.dtype | None = None
    only_narrow: bool = False

    @classmethod
    def parse(cls, dtype: str | torch.dtype | DtypePolicy) -> DtypePolicy:
        """Read `"keep"`, a torch dtype, or one of its names.

        Raises:
            UsageError: It is none of these.
        """
        if isinstance(dtype, DtypePolicy):
            return dtype
        if dtype == "keep":
            return cls()
        target = _NAMES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        if target not in _NAMES.values():
            raise UsageError("a dtype to which nothing is cast", expected=f"keep, {', '.join(_NAMES)}", found=dtype)
        return cls(target)

    def cast_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return what a tensor of this dtype is cast to, or None to leave it."""
        if self.target is None or dtype not in _CAST or dtype == self.target:
            return None
        return None if self.only_narrow and dtype.itemsize <= self.target.itemsize else self.target


_NO_HALF = DtypePolicy(torch.float32, only_narrow=True)


@dataclass(frozen=True, slots=True)
class Casts:
    """What becomes of the dtype of every tensor of a checkpoint.

    Attributes:
        policy: What becomes of most.
        kept: Names of tensors whose dtype stays.
        in_fp32: Names of tensors that are not cast to half of float32. What is there in half already is not widened:
            that adds bytes and no values, and those who load it do so.
    """

    policy: DtypePolicy = field(default_factory=DtypePolicy)
    kept: Collection[str] = frozenset()
    in_fp32: Collection[str] = frozenset()

    def cast_of(self, tensor: TensorInfo) -> torch.dtype | None:
        """Return what a tensor is cast to, or None to leave it."""
        if tensor.name in self.kept:
            return None
        has_no_half = tensor.name in self.in_fp32 and self.policy.target in HALF_DTYPES
        return (_NO_HALF if has_no_half else self.policy).cast_of(tensor.dtype)

    def is_spared(self, output: TensorInfo) -> bool:
        """Tell whether an output is float32 only since it is not cast to half of it."""
        is_fp32 = output.dtype is torch.float32 and output.name in self.in_fp32 and output.name not in self.kept
        return is_fp32 and self.policy.cast_of(torch.float32) in HALF_DTYPES


def are_cast(*dtypes: torch.dtype) -> bool:
    """Tell whether tensors of these dtypes are cast to one another: integers and packed floats are not."""
    return _CAST.issuperset(dtypes)


def scales_of_packed(tensors: Iterable[TensorInfo]) -> frozenset[str]:
    """Return the names of floating tensors that unpack others of their module, which are worth nothing without them.

    They go on from the name of a packed one (`weight_scale_inv`, `weight.absmax`), or say what they are (`scales`).
    """
    tensors = list(tensors)
    packed = {
        tensor.name
        for tensor in tensors
        if tensor.dtype.itemsize < _UNPACKED_BYTES and tensor.dtype not in {*_CAST, torch.bool}
    }
    modules, found = {name.rpartition(".")[0] for name in packed}, []
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        words = last.split("_")
        goes_on = module in modules and any(tensor.name.removesuffix(end) in packed for end in _ends(words))
        says_so = module in modules and not _SCALES.isdisjoint(words)
        if tensor.dtype in _CAST and (goes_on or says_so or module in packed):
            found.append(tensor.name)
    return frozenset(found)


def _ends(words: Sequence[str]) -> list[str]:
    """Return how a name ends that goes on from a shorter one, by a few words: of a_b_c, _c and _b_c."""
    return [f"_{'_'.join(words[index:])}" for index in range(max(1, len(words) - _MOST_WORDS), len(words))]


def model_dtype(outputs: Iterable[TensorInfo], casts: Casts) -> tuple[torch.dtype | None, bool]:
    """Return the dtype that a config should name, and whether all that may have been cast to it has it.

    It is what tensors were cast to; else the one that most bytes have. None where there is no floating tensor.
    """
    target = casts.policy.target
    is_cast = target is not None
    exempt = {*casts.kept, *casts.in_fp32}
    all_bytes, own_bytes = Counter[torch.dtype](), Counter[torch.dtype]()
    for output in outputs:
        if output.dtype in _CAST:
            all_bytes[output.dtype] += output.num_bytes
            own_bytes[output.dtype] += 0 if output.name in exempt else output.num_bytes
    own = {dtype for dtype, num_bytes in own_bytes.items() if num_bytes}
    if target not in own:
        target = max(own or all_bytes, key=all_bytes.__getitem__, default=None)
    return target, is_cast and own == {target}
