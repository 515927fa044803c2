"""Which tensors a model's class knows: by the names of its modules, and by those that it reads and writes instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch import nn

from ..spec import TensorInfo
from .aliases import find_aliases, unsaved_names
from .transformers import HubForm

__all__ = ["KnownTensors", "Shape"]

Shape = tuple[int, ...]

# Buffers that older versions of many classes saved. Each version of transformers passes over them.
_FORMER_BUFFERS = ("inv_freq", "position_ids")


class KnownTensors:
    """Names and shapes of the tensors of a model.

    A checkpoint may name fused experts and the parts of a model as its modules do or as the hub does, and leave out
    or add the name of the base model; `from_pretrained` takes each of these.

    Args:
        form: The form that it has on the hub.
    """

    def __init__(self, form: HubForm) -> None:
        self._form, self._twin = form, form.twin
        self._tensors = form.own

    def find(self, name: str) -> str | None:
        """Return the name under which a tensor of a checkpoint is known; None if it is not."""
        return next((each for each in self._variants(name) if each in self._tensors or each in self._hub), None)

    def expected_shape(self, tensor: TensorInfo) -> Shape | None:
        """Return the shape that a tensor of a checkpoint should have, where it has another one.

        Buffers and packed weights are not compared, nor the order of dims where there are more than two: some
        versions of a class store its experts transposed.
        """
        name = self.find(tensor.name)
        if name is None or not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            return None
        own = self._tensors.get(name)
        if own is not None and not isinstance(own, nn.Parameter):
            return None
        if own is not None and _agree(tensor.shape, tuple(own.shape)):
            return None
        other = self._hub.get(name)
        if other is not None and _agree(tensor.shape, other):
            return None
        return tuple(own.shape) if own is not None else other

    def unknown(self, names: Iterable[str], *, are_ignored_too: bool = False) -> list[str]:
        """Return the names that the class neither knows nor, unless those count too, declares to be of no concern."""
        ignored = self._declared("_keys_to_ignore_on_load_unexpected") if not are_ignored_too else []
        buffers = {name for name, _ in self._twin.named_buffers()}
        return [
            name
            for name in names
            if name not in buffers
            and name.rpartition(".")[2] not in _FORMER_BUFFERS
            and self.find(name) is None
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that `save_pretrained` would write and that are not among the names, in either form.

        They have the names of whichever form, that of the hub or that of the modules, the checkpoint lacks less of.
        """
        found = {self.find(name) for name in names}
        aliases = find_aliases(self._tensors, self._twin)
        present = {kept for alias, kept in aliases.items() if alias in found}
        left_out = aliases.keys() | present | unsaved_names(self._twin)
        ignored = self._declared("_keys_to_ignore_on_load_missing")
        saved = {
            name
            for name in self._tensors
            if name not in left_out and not any(re.search(pattern, name) for pattern in ignored)
        }
        lacking = {name: saved.intersection(inputs) - found for name, inputs in self._form.inputs.items()}
        of_hub = [name for name, inputs in lacking.items() if inputs and name not in found]
        needed = set[str]().union(*(lacking[name] for name in of_hub))
        return min(of_hub, [name for name in self._tensors if name in needed], key=len)

    @property
    def _hub(self) -> dict[str, Shape]:
        return self._form.shapes

    def _variants(self, name: str) -> Iterator[str]:
        yield name
        prefix = f"{getattr(self._twin, 'base_model_prefix', '')}."
        if prefix != ".":
            yield prefix + name
            if name.startswith(prefix):
                yield name.removeprefix(prefix)
        # How transformers 4 reads models of several parts; the first pattern that matches counts.
        for pattern, replacement in (getattr(self._twin, "_checkpoint_conversion_mapping", None) or {}).items():
            renamed, num_hits = re.subn(pattern, replacement, name)
            if num_hits:
                yield renamed
                return

    def _declared(self, attribute: str) -> list[str]:
        """Collect the regular expressions that transformers classes, at any depth, declare."""
        return sorted({key for module in self._twin.modules() for key in getattr(module, attribute, None) or ()})


def _agree(shape: Shape, expected: Shape) -> bool:
    is_one_value = math.prod(shape) == math.prod(expected) == 1  # FSDP2 takes no 0-dim parameter
    is_reordered = shape[2:] != () and sorted(shape) == sorted(expected)
    return shape == expected or is_one_value or is_reordered
