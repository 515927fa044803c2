"""To which dtype a floating tensor is cast. Integers, booleans and packed floats (fp8, fp4) are never cast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import UsageError

__all__ = ["DtypePolicy"]

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


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
