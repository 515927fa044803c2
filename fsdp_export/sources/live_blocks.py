"""A rank's blocks of the tensors of a live module, where these are: what they have to be, and whether they are that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ..compat import layout_of, local_of
from ..errors import SourceError
from ..spec import Sharding, TensorSpec

__all__ = ["Entry", "Form", "local_block"]


@dataclass(frozen=True, slots=True)
class Form:
    """What tensors of one shape that lie on the ranks in one way have in common.

    Attributes:
        shape: Their global shape.
        sharding: Who holds which block of them.
        is_copy: Whether nothing keeps the copies of different ranks equal.
        local_shape: The shape of this rank's block.
        device_mesh: Their mesh, which is kept or another one could get its id; None for plain tensors.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    is_copy: bool
    local_shape: tuple[int, ...]
    device_mesh: DeviceMesh | None

    def block(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return a local tensor in the shape of this rank's block; None if it is no such block."""
        if local.shape == self.local_shape:
            return local
        # Of a tensor without bytes FSDP2 keeps a shard of another shape.
        return local.new_empty(self.local_shape) if 0 in self.shape else None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as it was read last.

    No reference to it is kept, not even a weak one: `Module.to()` refuses to swap parameters that have any.

    Attributes:
        spec: What is planned of it.
        form: How it lies on the ranks.
        identity: Its id.
        layout: Its `layout_of`, which is kept or another one could get its id.
    """

    spec: TensorSpec
    form: Form
    identity: int
    layout: object

    def block(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's block, if a tensor is as the one that was read; None if it has to be looked at again.

        Call it under `no_grad`.
        """
        if value is None or is_lazy(value) or layout_of(value) is not self.layout:
            return None
        local = local_of(value)
        if local.requires_grad or type(local) is not torch.Tensor:  # a frozen parameter is not one
            local = local.detach()
        if type(local) is not torch.Tensor or local.dtype != self.spec.dtype or local.layout != torch.strided:
            return None
        return None if local.is_meta or local.is_conj() or local.is_neg() else self.form.block(local)


def local_block(name: str, value: torch.Tensor, *, may_be_meta: bool = False) -> torch.Tensor:
    """Return this rank's block of a tensor, which is in the module's memory. Call it under `no_grad`."""
    if is_lazy(value):
        raise SourceError("a parameter without a shape", name=name, fix="Run the lazy module once")
    local = local_of(value).detach()
    if local.is_meta and not may_be_meta:
        raise SourceError("a tensor without data (on the meta device)", name=name, fix="Load or initialize it first")
    if type(local) is not torch.Tensor:
        fix = "Dequantize or flatten it to plain tensors first"
        raise SourceError("a tensor subclass", name=name, found=type(local).__name__, fix=fix)
    if local.layout != torch.strided or local.is_quantized:
        raise SourceError("a layout that cannot be exported", name=name, expected="strided", found=local.layout)
    return local.resolve_conj().resolve_neg()
