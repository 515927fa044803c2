"""The reverse of how transformers loads a model: from the names and tensors of its modules to those of the hub.

From version 5 on transformers fuses experts, and renames parts of many models, as it loads them, and undoes that in
`save_pretrained`. It looks up what to undo by the classes of modules, which `fully_shard` replaces, so it is asked with
a twin of the model that has the classes of before. Version 4 renames the parts of some models and nothing else.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, listing
from ..spec import Sharding, TensorSpec
from ..steps import Step
from .aliases import unsaved_names
from .cut import CastOf, Conversion
from .peft_module import PeftModule, base_twins
from .trace import ConvertDict, Traced, checked, meta_tensors, trace

__all__ = ["HubConversion", "HubForm", "convert_live", "convert_stored"]

_log = logging.getLogger("fsdp_export")
_MAX_DIAGNOSED = 64


class HubConversion(Conversion):
    """What `save_pretrained` makes of the tensors of a model.

    Args:
        convert: As for `Conversion`.
        specs: As for `Conversion`.
        class_name: The model's class, for messages.
        folder: The checkpoint, if it is one on disk, for messages.
        hub: The form of a whole model, for a checkpoint that may lack some of it, or have some of it already.

    Attributes:
        blocks: Outputs that `save_pretrained` keeps in one file, and a number that those share which it does.

    Raises:
        PlanError: Some tensors cannot be turned back.
    """

    def __init__(
        self,
        convert: ConvertDict,
        specs: Sequence[TensorSpec],
        *,
        class_name: str,
        folder: Path | None = None,
        hub: HubForm | None = None,
    ) -> None:
        try:
            super().__init__(convert, specs, f"transformers' {class_name}")
        except PlanError as error:
            if error.__cause__ is None:
                raise
            names = _culprits(convert, specs)
            what = f"tensors that {class_name} cannot turn back into those of the hub"
            cause = error.__cause__
            fix = "Export all tensors of a group, or give an adapter that converts them"
            raise PlanError(what, name=None, file=folder, found=f"{listing(names)}: {cause}", fix=fix) from error
        if self.unused:
            what, fix = f"tensors of which {class_name} would lose all values", "Give an adapter that converts them"
            raise PlanError(what, file=folder, found=listing(self.unused), fix=fix)
        self._expected: Mapping[str, Sequence[str]] = hub.inputs if hub is not None else {}
        self._folder = folder
        self.blocks = _blocks(self._traced.values()) if hub is None else hub.blocks

    @property
    def num_converted(self) -> tuple[int, int]:
        """How many tensors get another name or form, and how many tensors are made of them."""
        outputs = self._traced.values()
        made = [output for output in outputs if output.whole is None or output.whole.name != output.info.name]
        return len({spec for output in made for spec in output.inputs}), len(made)

    def renamed(self, tied: TensorSpec) -> str:
        """Return the hub's name of a tensor that is left out since it is tied; its own where it would be several."""
        outputs = checked(lambda: self._convert(meta_tensors([tied])))
        return next(iter(outputs)) if len(outputs) == 1 else tied.name

    def steps(self, names: Collection[str], cast_of: CastOf) -> list[Step]:
        """Cut the conversion into steps, as `Conversion` does.

        Raises:
            PlanError: Also of an output of which some inputs are missing.
        """
        for name in self.names:
            if name in names:
                self._check_complete(name)
        return super().steps(names, cast_of)

    def _check_complete(self, name: str) -> None:
        """Refuse what a part of its tensors would make: a tensor of another shape under the same name."""
        expected, found = self._expected.get(name, ()), self.made_of(name)
        if set(found) < set(expected):
            raise PlanError(
                "a tensor of which a part is missing",
                name=name,
                file=self._folder,
                expected=f"{len(expected)} tensors: {listing(expected)}",
                found=listing(found),
                fix=f"Leave what there is out with --exclude {name}",
            )


class HubForm:
    """Under which names and in which shapes `save_pretrained` writes the tensors of a model.

    Where nothing is converted, or that fails, they are those of the modules.

    Args:
        twin: The model, on the meta device.
        names: Names of the checkpoint that the model was loaded from, as far as they are known. `save_pretrained` puts
            back a prefix that was taken off names then, and remembers that in the model.
    """

    def __init__(self, twin: nn.Module, names: Collection[str] = ()) -> None:
        if names:
            _remember_prefixes(twin, frozenset(names))
        self.twin = twin
        self.class_name = type(twin).__name__
        self.own: dict[str, torch.Tensor] = {
            name: value
            for name, value in twin.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)  # what `get_extra_state` gives is none
        }
        self.convert = _reversal(twin)

    @cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Of which tensors of the modules those of the hub are made, in the order of files."""
        return {output.info.name: tuple(spec.name for spec in output.inputs) for output in self._traced}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the hub's tensors."""
        return {output.info.name: output.info.shape for output in self._traced}

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Which of the hub's tensors one file holds; see `HubConversion`."""
        return _blocks(self._traced)

    @cached_property
    def renamed(self) -> dict[str, str]:
        """The hub's names of tensors that it has as the modules have them."""
        whole = [output for output in self._traced if output.whole is not None]
        return {output.inputs[0].name: output.info.name for output in whole}

    @cached_property
    def buffers(self) -> set[str]:
        """The names of buffers, those of the modules and those of the hub."""
        own = {name for name, tensor in self.own.items() if not isinstance(tensor, nn.Parameter)}
        return own | {name for name, inputs in self.inputs.items() if own.issuperset(inputs)}

    @cached_property
    def _traced(self) -> list[Traced]:
        sharding = Sharding.replicated((0,))
        specs = [TensorSpec(name, tuple(each.shape), each.dtype, sharding) for name, each in self.own.items()]
        try:
            return trace(self.convert, specs)
        except PlanError as error:
            _log.debug("the tensors of %s cannot be turned back: %s", self.class_name, error)
            return trace(dict, specs)


def convert_live(model: nn.Module, specs: Sequence[TensorSpec], peft: PeftModule | None = None) -> HubConversion | None:
    """Plan what `save_pretrained` would make of the tensors of a live module, wrapped or not.

    Nothing of the module is built anew or changed, and transformers is not imported: a module of its classes has done
    that.

    Args:
        model: The module. Models of transformers inside of other modules are converted below their own names.
        specs: Its tensors; of what PEFT has changed, those of the merged model.
        peft: What PEFT has made of the module; None where it has made nothing of it.

    Returns:
        The conversion; None where it would change nothing.

    Raises:
        PlanError: As `HubConversion`.
    """
    twins = base_twins(model, peft)
    names = [spec.name for spec in specs]
    if not twins or any(segment.startswith("lora_") for name in names for segment in name.split(".")):
        return None
    reversals: list[tuple[str, ConvertDict]] = []
    for path, twin in twins:
        # A module may leave the name of what it wraps out of its state dict.
        prefix = path if any(name.startswith(path) for name in names) else ""
        reversals.append((prefix, _reversal(twin)))

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest, outputs = dict(tensors), dict[str, torch.Tensor]()
        for prefix, reverse in reversals:
            own = {name: rest.pop(name) for name in tensors if name in rest and name.startswith(prefix)}
            converted = reverse({name.removeprefix(prefix): tensor for name, tensor in own.items()})
            _add(outputs, {prefix + name: tensor for name, tensor in converted.items()})
        _add(outputs, rest)
        return outputs

    conversion = HubConversion(convert, specs, class_name=type(twins[0][1]).__name__)
    return None if conversion.names == tuple(names) and conversion.num_converted == (0, 0) else conversion


def convert_stored(hub: HubForm, specs: Sequence[TensorSpec], folder: Path | None) -> HubConversion:
    """Plan what `save_pretrained` would make of the tensors of a checkpoint, and their order.

    What has a name of the hub already, and none of a module, stays as it is. Tables that the class computes anew are
    left out. One value has the shape of the class: FSDP2 takes no 0-dim parameter, and transformers no other one.

    Args:
        hub: The form that the model of its config has.
        specs: The tensors.
        folder: The checkpoint, for messages.

    Raises:
        PlanError: As `HubConversion`; or two tensors get one name.
    """
    position = {name: index for index, name in enumerate(hub.inputs)}
    left_out = unsaved_names(hub.twin)
    specs = [spec for spec in specs if spec.name not in left_out]
    names = {spec.name for spec in specs}
    stays = names if names <= position.keys() else position.keys() - hub.own.keys()

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = dict(hub.convert({name: tensor for name, tensor in tensors.items() if name not in stays}))
        _add(outputs, {name: tensor for name, tensor in tensors.items() if name in stays})
        ordered = sorted(outputs, key=lambda name: position.get(name, len(position)))
        return {name: _shaped_as(hub.shapes.get(name), outputs[name]) for name in ordered}

    marked = [replace(spec, is_buffer=True) if spec.name in hub.buffers else spec for spec in specs]
    return HubConversion(convert, marked, class_name=hub.class_name, folder=folder, hub=hub)


def _shaped_as(shape: tuple[int, ...] | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return one value in the shape that it should have, and all else as it is."""
    return tensor.reshape(shape) if shape is not None and tensor.numel() == math.prod(shape) == 1 else tensor


def _remember_prefixes(twin: Any, names: frozenset[str]) -> None:
    """Let a twin be saved with those prefixes that the names of a checkpoint have, as after `from_pretrained`."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return
    changes = get_model_conversion_mapping(twin, add_legacy=False)
    prefixes = [change for change in changes if isinstance(change, PrefixChange)]
    if not prefixes:
        return
    chosen = [change for change in changes if change not in prefixes]
    best = len(HubForm(twin).inputs.keys() & names)
    for prefix in prefixes:
        trial = [change for change in changes if change in chosen or change is prefix]
        former, twin._weight_conversions = getattr(twin, "_weight_conversions", None), trial  # noqa: SLF001
        num_known = len(HubForm(twin).inputs.keys() & names)
        if num_known > best:
            chosen, best = trial, num_known
        else:
            twin._weight_conversions = former  # noqa: SLF001


def _reversal(twin: nn.Module) -> ConvertDict:
    """Return what `save_pretrained` does to a state dict of a model, or to a part of one."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _former_reversal(twin)

    def reverse(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(twin, dict(tensors))  # type: ignore[arg-type]
        return converted

    try:
        reverse({})
    except Exception as error:  # noqa: BLE001  whatever the conversions of a class raise, its weights can be exported
        what = "cannot be turned back into those of the hub, so they keep the names of its modules"
        _log.warning("the tensors of %s %s: %s", type(twin).__name__, what, str(error) or type(error).__name__)
        return dict
    return reverse


def _former_reversal(twin: nn.Module) -> ConvertDict:
    """Return what transformers 4 does: it turns back how it renames the parts of models that see."""
    from transformers import modeling_utils

    mapping: Mapping[str, str] = getattr(twin, "_checkpoint_conversion_mapping", None) or {}
    class_name = type(twin).__name__.lower()
    if not mapping or not any(kind in class_name for kind in getattr(modeling_utils, "VLMS", ())):
        return dict
    # The pattern of how a name begins on the hub, without what only tells it from others, is how it begins there.
    begins = {own: re.sub(r"\(.*\)", "", pattern.lstrip("^")) for pattern, own in mapping.items()}

    def rename(name: str) -> str:
        for own, begin in begins.items():
            renamed, num_hits = re.subn(own, begin, name)
            if num_hits:
                return renamed
        return name

    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def _add(outputs: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    for name in more:
        if name in outputs:
            fix = "Save a state dict in which only one of them is"
            raise PlanError("two tensors that get one name", name=name, fix=fix)
    outputs.update(more)


def _blocks(traced: Iterable[Traced]) -> dict[str, int]:
    """Number the memory that outputs share: `save_pretrained` puts these into one file, and counts them once."""
    outputs = list(traced)
    sharing = Counter(output.storage for output in outputs)
    return {output.info.name: output.storage for output in outputs if sharing[output.storage] > 1}


def _culprits(convert: ConvertDict, specs: Sequence[TensorSpec]) -> list[str]:
    """Return the tensors without which a conversion does not fail; layers and experts count as one."""
    groups = [re.sub(r"\d+", "*", spec.name) for spec in specs]
    kinds = dict.fromkeys(groups)

    def all_but(kind: str) -> list[TensorSpec]:
        return [spec for spec, group in zip(specs, groups, strict=True) if group != kind]

    culprits = [kind for kind in kinds if _succeeds(convert, all_but(kind))] if len(kinds) <= _MAX_DIAGNOSED else []
    return culprits or [spec.name for spec in specs]


def _succeeds(convert: ConvertDict, specs: Sequence[TensorSpec]) -> bool:
    try:
        trace(convert, specs)
    except PlanError:
        return False
    return True
