"""What an exporter delivers: how the tensors of a module, or of a source, become those of a checkpoint, on meta.

Names, ties, LoRA, conversion, patterns and dtypes come together here, once, at the first use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .conversion.adapter import adapter_name, conversion_of
from .conversion.aliases import unsaved_names
from .conversion.cut import Conversion
from .conversion.full_precision import live_in_fp32
from .conversion.lora_view import LoraView
from .conversion.peft_module import PeftModule, find_peft
from .conversion.transformers import HubConversion, convert_live
from .dtypes import Casts, DtypePolicy, scales_of_packed
from .fence import Operation
from .memory import without_collection
from .names import matching, select
from .plan import Plan
from .provenance import provenance
from .sources.base import Source
from .sources.live import LiveSource
from .spec import TensorInfo, TensorSpec
from .steps import copy_step
from .ties import LiveTies, equal_ties, live_ties

__all__ = ["Planning"]


class Planning:
    """Plans an export. All but `refresh` is local, and no value is looked at.

    Args:
        model: The module, or a `Source`; as for `Exporter`, and so are the others.
        state_dict: See there.
        dtype: See there.
        keep_dtype: See there.
        include: See there.
        exclude: See there.
        adapter: See there.
        lora: See there.
        aliases: See there.
        untied: See there.
        in_fp32: See there.
        device: See there.

    Attributes:
        pattern_hits: How many names each pattern matched; once there is a plan.
        num_available: How many names there are to choose from; once there is a plan.
    """

    def __init__(
        self,
        model: nn.Module | Source,
        *,
        state_dict: Mapping[str, torch.Tensor] | None,
        dtype: DtypePolicy,
        keep_dtype: Sequence[str],
        include: Sequence[str],
        exclude: Sequence[str],
        adapter: Any,
        lora: str | LoraView,
        aliases: Mapping[str, str],
        untied: Sequence[str],
        in_fp32: Collection[str],
        device: torch.device | None,
    ) -> None:
        self._model, self._state_dict, self._lora = model, state_dict, lora
        self._dtype = dtype
        self._include, self._exclude, self._keep_dtype = (
            (patterns,) if isinstance(patterns, str) else tuple(patterns) for patterns in (include, exclude, keep_dtype)
        )
        self._adapter, self._given_aliases, self._untied, self._in_fp32 = adapter, aliases, tuple(untied), in_fp32
        self._device = device
        self._equal: dict[str, str] = {}  # of ties that are broken, those whose values were equal when last looked at

    @cached_property
    def source(self) -> Source:
        """What is exported. Local; raises what cannot be exported (`SourceError`, `UsageError`)."""
        if not isinstance(self._model, nn.Module):
            return self._model
        aliases = self._ties.aliases if self._peft is None else {}
        return LiveSource(self._model, state_dict=self._state_dict, aliases=aliases, device=self._device)

    @cached_property
    @without_collection()
    def plan(self) -> Plan:
        """Names, shapes and dtypes that will be delivered; prints as a table. Local, and nothing is gathered.

        Where a module has two parameters for one that its config declares tied, both count until an export compares
        them.
        """
        specs = {spec.name: spec for spec in self._specs}
        available = self.conversion.names if self.conversion is not None else tuple(specs)
        kept = [name for name in available if name not in self._given_aliases]
        self.num_available = len(kept)
        names, self.pattern_hits = select(kept, self._include, self._exclude)
        casts = self._casts([self.conversion.output(name) if self.conversion else specs[name] for name in kept])
        if self.conversion is not None:
            steps = self.conversion.steps(frozenset(names), casts.cast_of)
        else:
            steps = [copy_step(specs[name], casts.cast_of(specs[name])) for name in names]
        if self.lora_view is not None:
            steps = [self.lora_view.on_source(step) for step in steps]
        blocks = self.conversion.blocks if self.conversion is not None else {}
        return Plan(
            tuple(steps),
            self.source.ranks,
            self._renamed_aliases(),
            self._untied or tuple(sorted({*self._ties.ended, *self._ties.broken} - self._equal.keys())),
            are_tied_by_hand=self._ties.are_undeclared,
            names=tuple(names),
            blocks=blocks,
            casts=casts,
        )

    @cached_property
    def conversion(self) -> Conversion | None:
        """How tensors become those of the checkpoint; None where they stay. Local, and nothing is read.

        What the adapter does, or, for models of transformers, what `save_pretrained` does.
        """
        if isinstance(self._adapter, Conversion):
            return self._adapter
        if self._adapter is not None:
            return Conversion(conversion_of(self._adapter), self._specs, adapter_name(self._adapter))
        if not isinstance(self._model, nn.Module) or (self._found_peft is not None and not self._is_merged):
            return None
        return convert_live(self._model, self._specs, self._peft)

    @cached_property
    def lora_view(self) -> LoraView | None:
        """The tensors as `lora` asks for them; None for what is exported as it is. Local, and nothing is read."""
        if self._peft is None:
            return self._lora if isinstance(self._lora, LoraView) else None
        see = self._peft.adapter if self._lora == "adapter" else self._peft.merged
        return see(self.source.specs, self.source.device)

    @property
    def described(self) -> nn.Module:
        """The module that a checkpoint's config describes: names that are kept do not change it."""
        assert isinstance(self._model, nn.Module)
        return self._found_peft.base if self._found_peft is not None else self._model

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is exported, and not its model."""
        return self._peft is not None and self._lora == "adapter"

    @property
    def peft_config(self) -> Any:
        """PEFT's config of the adapter that is exported.

        Raises:
            UsageError: Several are active.
        """
        assert self._peft is not None
        return self._peft.config

    @property
    def keeps_lora(self) -> bool:
        """Whether LoRA is exported beside the weights that it is for, under PEFT's names."""
        return self._found_peft is not None and self._lora == "keep"

    def provenance(self) -> dict[str, object]:
        """Return what the record of an export says of its source and of the choices made here. Local."""
        kept = "keep" if self.keeps_lora else None
        return provenance(
            self.source,
            dtype=self._dtype,
            conversion=self.conversion,
            lora=self.lora_view.kind if self.lora_view is not None else kept,
            include=self._include,
            exclude=self._exclude,
            keep_dtype=self._keep_dtype,
        )

    def refresh(self, operation: Operation) -> str:
        """Look again at what may have changed since the plan was made: values that are tied, and adapters. Collective.

        Returns:
            What the plan does not show and all ranks must agree on, in words.

        Raises:
            ExportError: The module is not the one that was planned, or the ranks differ.
        """
        self.source.refresh()
        if self._ties.broken:
            specs = {spec.name: spec for spec in self.source.specs}
            origins = self.lora_view.origins if self.lora_view is not None else specs
            equal = equal_ties(self.source, self._ties, operation, origins)
            if equal != self._equal:
                self._equal = equal
                for made in ("plan", "conversion"):
                    vars(self).pop(made, None)
        if self._peft is None or self.lora_view is None:
            return ""
        self._peft.refresh(self.lora_view, self.source.specs)
        return f" lora={self.lora_view.digest}"

    @property
    def _specs(self) -> list[TensorSpec]:
        """The tensors of a checkpoint, in the module's names."""
        specs = self.lora_view.specs if self.lora_view is not None else list(self.source.specs)
        if not isinstance(self._model, nn.Module):
            return specs
        base = self._peft.base if self._peft is not None else self._model
        left_out = unsaved_names(base) | self._aliases.keys()
        return [spec for spec in specs if spec.name not in left_out]

    @property
    def _peft(self) -> PeftModule | None:
        """What PEFT has made of the module, if that is not to be kept."""
        return self._found_peft if self._lora != "keep" else None

    @cached_property
    def _found_peft(self) -> PeftModule | None:
        return find_peft(self._model) if isinstance(self._model, nn.Module) else None

    @cached_property
    def _ties(self) -> LiveTies:
        if not isinstance(self._model, nn.Module) or (self._peft is not None and not self._is_merged):
            return LiveTies({}, {}, are_undeclared=False)
        return live_ties(self._model, self._peft, self.lora_view)

    @property
    def _is_merged(self) -> bool:
        return self._peft is not None and not self.is_adapter

    @property
    def _aliases(self) -> dict[str, str]:
        """Names to leave out: of a live module in its own names, with ties that are broken but were found equal."""
        live = {**self._ties.aliases, **self._equal}
        return {**self._given_aliases, **{alias: live.get(kept, kept) for alias, kept in live.items()}}

    def _casts(self, available: Sequence[TensorInfo]) -> Casts:
        names = [tensor.name for tensor in available]
        hits = matching(names, self._keep_dtype)
        self.pattern_hits |= {pattern: len(matched) for pattern, matched in hits.items()}
        kept = scales_of_packed(available).union(*hits.values())
        in_fp32 = frozenset(self._in_fp32)
        if isinstance(self._model, nn.Module) and (self._peft is None or self._is_merged):
            in_fp32 = live_in_fp32(self._model, self._peft, names, self.conversion, self._dtype.target)
        return Casts(self._dtype, kept, in_fp32)

    def _renamed_aliases(self) -> tuple[tuple[str, str], ...]:
        """Return the aliases in the names of the checkpoint."""
        pairs = self._aliases.items()
        if isinstance(self._model, nn.Module) and isinstance(self.conversion, HubConversion):
            renamed, specs = self.conversion.renamed, {spec.name: spec for spec in self._specs}
            pairs = {renamed(replace(specs[kept], name=alias)): renamed(specs[kept]) for alias, kept in pairs}.items()
        return tuple(sorted(pairs))
