"""What a LoRA adapter adds to a weight, row by row: the arithmetic of PEFT's merge, out of place.

Where PEFT multiplies whole matrices, this multiplies some of their rows or columns, and must round alike. BLAS takes
other kernels, which sum in another order, where there are fewer than 16 (measured with MKL): so few are filled up, and
a product that is no larger itself is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn import functional

from ..spec import TensorSpec

__all__ = ["Form", "Update", "merged_rows"]

_FEWEST = 16
_BLOCK_BYTES = 32 << 20
_LOW = (torch.float16, torch.bfloat16)

_Tensors = Mapping[str, torch.Tensor]


class Form(Enum):
    """How a weight lies to the matrices of its adapter, `A` (rank, in) and `B` (out, rank)."""

    DENSE = "(out, in)"
    TRANSPOSED = "(in, out)"
    CONVOLUTION = "(out, in, kernel)"
    EXPERTS = "(experts, out, in)"
    TRANSPOSED_EXPERTS = "(experts, in, out)"
    BIAS = "(out)"
    TOKENS = "(tokens, size)"


@dataclass(frozen=True, slots=True)
class Update:
    """What one adapter does to one weight.

    Attributes:
        form: How the weight lies to the matrices.
        weight: The weight.
        second: `B`; its bias for a bias; the rows of trained tokens, which replace those of the weight.
        first: `A`, if there is one.
        scaling: What the product is multiplied by.
        magnitude: DoRA's norms; None for plain LoRA.
        tokens: Which rows trained tokens replace.
        rounds: Whether the product is rounded to the weight's dtype before it is added, as PEFT does with embeddings
            and parameters.
    """

    form: Form
    weight: TensorSpec
    second: TensorSpec
    first: TensorSpec | None = None
    scaling: float = 1.0
    magnitude: TensorSpec | None = None
    tokens: tuple[int, ...] = ()
    rounds: bool = False

    @property
    def by_unit(self) -> tuple[TensorSpec, ...]:
        """Inputs of which row `i` is all that row `i` of the weight needs."""
        if self.form is Form.BIAS:
            return (self.second,)
        if self.form is not Form.DENSE:
            return ()
        return tuple(filter(None, (None if self._is_small else self.second, self.magnitude)))

    @property
    def whole(self) -> tuple[TensorSpec, ...]:
        """Inputs of which every row of the weight needs all."""
        return tuple(spec for spec in (self.second, self.first, self.magnitude) if spec and spec not in self.by_unit)

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row of the weight depends on the others: norms go across the rows of a transposed one."""
        return self.magnitude is not None and self.form is Form.TRANSPOSED

    def apply(self, rows: torch.Tensor, first_row: int, tensors: _Tensors) -> torch.Tensor:
        """Return rows of the weight with the adapter in them, in new memory.

        Args:
            rows: The rows.
            first_row: Which they are.
            tensors: The inputs by name, on the same device; of those by unit the same rows.
        """
        mine = slice(first_row, first_row + len(rows))
        second = tensors[self.second.name]
        if self.form is Form.TOKENS:
            return self._with_tokens(rows, mine, second)
        if self.first is None:
            return (rows + second * self.scaling).to(rows.dtype)
        delta = self._delta(tensors[self.first.name], second, mine, rows.dtype)
        total = rows + delta
        if self.magnitude is not None:
            total = self._scaled(total, rows, delta, tensors[self.magnitude.name], mine)
        return total.to(rows.dtype)

    def _delta(self, first: torch.Tensor, second: torch.Tensor, mine: slice, dtype: torch.dtype) -> torch.Tensor:
        """Multiply as PEFT does on the CPU, in float32 or wider, and round to the adapter's dtype."""
        delta_dtype = second.dtype
        if delta_dtype in _LOW:
            first, second = first.float(), second.float()
        if self.form in {Form.EXPERTS, Form.TRANSPOSED_EXPERTS}:
            delta = self._of_experts(first, second, mine)
        elif self.form is Form.CONVOLUTION:
            delta = _convolved(first, second)[mine]
        elif self.form is Form.TRANSPOSED:
            delta = (second @ first).T[mine] if self._is_small else _product(second, first[:, mine]).T
        else:
            delta = (second @ first)[mine] if self._is_small else _product(second, first)
        delta = (delta * self.scaling).to(delta_dtype)
        return delta.to(dtype) if self.rounds else delta

    def _of_experts(self, first: torch.Tensor, second: torch.Tensor, mine: slice) -> torch.Tensor:
        """Multiply the matrices of each expert, whose ranks lie side by side in `A`, and one by one in turn in `B`."""
        num_experts = self.weight.num_rows
        first = first.reshape(num_experts, -1, first.shape[-1])
        second = second.reshape(second.shape[0], -1, num_experts)
        if not self._is_small:
            first, second, mine = first[mine], second[..., mine], slice(None)
        order = "e o i" if self.form is Form.EXPERTS else "e i o"
        return torch.einsum(f"o r e, e r i -> {order}", second, first)[mine]

    def _scaled(
        self, total: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor, mine: slice
    ) -> torch.Tensor:
        """Give rows, or columns of a transposed weight, the norms of DoRA."""
        if self.form is Form.TRANSPOSED:
            return (magnitude / _norms(rows.T + delta.T)).view(1, -1) * total
        if self.form is Form.CONVOLUTION:
            magnitude = magnitude.reshape(-1)[mine]
        return (magnitude / _norms(total)).view(-1, *[1] * (total.dim() - 1)) * total

    def _with_tokens(self, rows: torch.Tensor, mine: slice, trained: torch.Tensor) -> torch.Tensor:
        inside = [(token, index) for index, token in enumerate(self.tokens) if mine.start <= token < mine.stop]
        positions = torch.tensor([token - mine.start for token, _ in inside], dtype=torch.long, device=rows.device)
        return rows.index_copy(0, positions, trained[[index for _, index in inside]].to(rows.dtype))

    @property
    def _is_small(self) -> bool:
        """Whether the product has so few rows or columns that BLAS rounds it in its own way."""
        return self.first is not None and min(self.first.shape[1], self.second.shape[0]) < _FEWEST


def merged_rows(rows: torch.Tensor, first_row: int, updates: Sequence[Update], tensors: _Tensors) -> torch.Tensor:
    """Return rows of a weight with all its adapters in them, in new memory and with little more than that.

    Args:
        rows: The rows.
        first_row: Which they are.
        updates: What the adapters do, one after the other.
        tensors: The inputs of these by name, on the device of the rows; of those by unit the same rows.
    """

    def merged(low: int, high: int) -> torch.Tensor:
        parts = {spec.name: tensors[spec.name][low:high] for update in updates for spec in update.by_unit}
        part = rows[low:high]
        for update in updates:
            part = update.apply(part, first_row + low, {**tensors, **parts})
        return part

    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        num_rows = max(_BLOCK_BYTES // max(rows[:1].nbytes, 1), _FEWEST)
        if len(rows) <= num_rows or any(update.needs_all_rows for update in updates):
            return merged(0, len(rows))
        result = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        for low in range(0, len(rows), num_rows):
            result[low : low + num_rows] = merged(low, low + num_rows)
        return result


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply some rows and columns of matrices so that each number comes out as it does among all of them."""
    num_rows, num_columns = left.shape[0], right.shape[1]
    if num_rows < _FEWEST:
        left = torch.cat([left, left.new_zeros(_FEWEST - num_rows, left.shape[1])])
    if num_columns < _FEWEST:
        right = torch.cat([right, right.new_zeros(right.shape[0], _FEWEST - num_columns)], dim=1)
    return (left @ right)[:num_rows, :num_columns]


def _convolved(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if set(first.shape[2:]) == {1} and first.dim() == 4:  # noqa: PLR2004  PEFT multiplies in two dims, and else not
        return (second[:, :, 0, 0] @ first[:, :, 0, 0])[..., None, None]
    convolve = _CONVOLUTIONS[first.dim()]
    return convolve(first.transpose(0, 1), second).transpose(0, 1)


_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {
    3: functional.conv1d,
    4: functional.conv2d,
    5: functional.conv3d,
}


def _norms(weight: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor
    if weight.dim() == 2:  # noqa: PLR2004  a matrix
        norms = torch.linalg.norm(weight, dim=1).to(weight.dtype)
        return norms
    norms = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())))
    return norms
