"""A live model that PEFT has changed: what its tensors are called without that, and what its adapters do to them.

PEFT's classes are known by their names, so that nothing is imported that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import SourceError, UsageError, listing
from ..spec import TensorSpec
from .aliases import clean_modules
from .live_twin import pretrained_twins
from .lora_view import LoraView
from .low_rank import Update
from .peft_names import adapter_names
from .updates import ALONE, Factors, bias_update, token_update, weight_update

__all__ = ["PeftModule", "base_twins", "find_peft"]

_MERGED = {f"peft.tuners.lora.layer.{name}" for name in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")}
_EXPERTS = "peft.tuners.lora.layer.ParamWrapper"
_TOKENS = "peft.tuners.trainable_tokens.layer.TrainableTokensLayer"
_AGAIN = "Make a new Exporter"
_KEPT = "Keep the names that the model has (lora='keep')"


def find_peft(model: nn.Module) -> PeftModule | None:
    """Return what PEFT has made of a model, wrapped or not; None if it has made nothing of it."""
    if "peft" not in sys.modules:
        return None
    modules = {name.removesuffix("."): module for name, module in clean_modules(model)}
    bases = ("PeftModel", "BaseTunerLayer", "AuxiliaryTrainingWrapper")
    return PeftModule(modules) if any(_is_a(module, *bases) for module in modules.values()) else None


def base_twins(model: nn.Module, peft: PeftModule | None) -> list[tuple[str, nn.Module]]:
    """Return a twin of every model of transformers in a module, as `pretrained_twins`, without what PEFT has put there.

    Args:
        model: The module, wrapped or not.
        peft: What PEFT has made of it; None where it has made nothing of it.

    Returns:
        Pairs of a name as the merged model has it, with a trailing dot unless it is empty, and a twin.
    """
    if peft is None:
        return pretrained_twins(model)
    twins = [(peft.base_name(path.removesuffix(".")), twin) for path, twin in pretrained_twins(model, peft.original)]
    return [(f"{path}." if path else "", twin) for path, twin in twins if path is not None]


class PeftModule:
    """A model with adapters. Nothing of it is changed.

    Args:
        modules: All modules by their names without wrapper segments.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    @property
    def base(self) -> nn.Module:
        """The model that was given to PEFT, if that has made another one of it; else what has adapters inside."""
        root: Any = self._modules[""]
        return root.get_base_model() if _is_a(root, "PeftModel") else root  # type: ignore[no-any-return]

    @property
    def merged_layers(self) -> list[str]:
        """The names of the layers whose weight has an adapter in it at the moment."""
        layers = ((path, module) for path, module in self._modules.items() if _is_a(module, "BaseTunerLayer"))
        return [path for path, layer in layers if getattr(layer, "merged_adapters", ())]

    def base_name(self, name: str) -> str | None:
        """Return what the merged model calls a tensor; None if it has none of it."""
        kept, path, segments = [], "", name.split(".")
        while segments:
            module, segment = self._modules.get(path), segments.pop(0)
            path = f"{path}.{segment}".removeprefix(".")
            if _is_a(module, "BaseTunerLayer"):
                if segment != "base_layer":
                    return None
            elif _is_a(module, "ModulesToSaveWrapper"):
                adapter = segments.pop(0) if segment == "modules_to_save" else None
                path += f".{adapter}" if adapter is not None else ""
                if adapter != next(iter(_active(module)), None):
                    return None
            elif not _is_a(module, "TrainableTokensWrapper") and not (
                _is_a(module, "PeftModel", "BaseTuner") and segment in {"base_model", "model"}
            ):
                kept.append(segment)
        return ".".join(kept)

    def original(self, module: Any) -> nn.Module:
        """Return what the merged model has in the place of a module: what that adapts, or the copy that is trained."""
        if _is_a(module, "ModulesToSaveWrapper"):
            adapter = next(iter(_active(module)), None)
            return module.modules_to_save[adapter] if adapter is not None else module.original_module  # type: ignore[no-any-return]
        if _is_a(module, "TrainableTokensWrapper"):
            module = module.token_adapter
        return module.get_base_layer() if _is_a(module, "BaseTunerLayer") else module  # type: ignore[no-any-return]

    def merged(self, specs: Sequence[TensorSpec], device: torch.device) -> LoraView:
        """Return the tensors of the base model with all active adapters merged.

        Args:
            specs: The tensors of the model.
            device: Where to merge.

        Raises:
            UsageError: An active adapter cannot be merged.
            SourceError: A weight is quantized, or an adapter does not fit it.
        """
        for adapter in self.active:
            self._refuse_method(adapter)
        by_name = {spec.name: spec for spec in specs}
        names = {name: self.base_name(name) for name in by_name}
        origins = {base: by_name[name] for name, base in names.items() if base is not None}
        updates: dict[str, list[Update]] = {}
        for path, layer in self._modules.items():
            if _is_a(layer, "BaseTunerLayer"):
                for update in self._updates(path, layer, by_name):
                    base = names[update.weight.name]
                    if base is not None:
                        updates.setdefault(base, []).append(update)
        return LoraView("merge", origins, updates, device)

    def adapter(self, specs: Sequence[TensorSpec], device: torch.device) -> LoraView:
        """Return the tensors of the active adapter, under PEFT's names.

        Raises:
            UsageError: Several are active, or it is not LoRA.
        """
        self._refuse_method(self.active_adapter)
        by_name = {spec.name: spec for spec in specs if not spec.name.startswith(self._further_names)}
        names = adapter_names(by_name, self.active_adapter, str(getattr(self.config, "bias", "none")))
        return LoraView("adapter", {new: by_name[old] for new, old in names.items()}, {}, device)

    def refresh(self, view: LoraView, specs: Sequence[TensorSpec]) -> None:
        """Look again for what adapters do: they may have been merged, scaled, or exchanged since.

        Args:
            view: What was planned.
            specs: The tensors of the model.

        Raises:
            SourceError: They do something else now.
        """
        now = PeftModule(self._modules)
        see = now.adapter if view.kind == "adapter" else now.merged
        if see(specs, view.device).digest != view.digest:
            raise SourceError("the module is not the one that was planned: its adapters changed", fix=_AGAIN)

    @cached_property
    def active(self) -> list[str]:
        """The adapters that are active in any module."""
        layers = [module for module in self._modules.values() if _is_a(module, *_HAVE_ADAPTERS)]
        active = dict.fromkeys(adapter for layer in layers for adapter in _active(layer))
        return list(active) or list(self._configs)[:1]

    @property
    def active_adapter(self) -> str:
        """The adapter that is active.

        Raises:
            UsageError: There are several.
        """
        if len(self.active) != 1:
            fix = "Activate the one that is meant (model.set_adapter), or merge them (lora='merge')"
            raise UsageError("several active adapters", expected="one", found=listing(self.active), fix=fix)
        return self.active[0]

    @property
    def config(self) -> Any:
        """PEFT's config of the active adapter."""
        return self._configs.get(self.active_adapter)

    @property
    def _further_names(self) -> tuple[str, ...]:
        """How names of trained tokens begin that are those of another module, which a tied one has once more."""
        tokens = ((path, layer) for path, layer in self._modules.items() if _is_a(layer, "TrainableTokensLayer"))
        return tuple(f"{path}.trainable_tokens_delta." for path, layer in tokens if _is_tied(layer))

    @cached_property
    def _configs(self) -> dict[str, Any]:
        found = (getattr(module, "peft_config", None) for module in self._modules.values())
        return next((configs for configs in found if isinstance(configs, dict)), {})

    def _refuse_method(self, adapter: str) -> None:
        method = getattr(self._configs.get(adapter), "peft_type", "LORA")
        method = str(getattr(method, "value", method))
        if method not in {"LORA", "TRAINABLE_TOKENS"}:
            what = f"an adapter of a kind that is neither merged nor exported alone: {adapter!r}"
            raise UsageError(what, expected="LoRA or DoRA of PEFT", found=method, fix=_KEPT)

    def _updates(self, path: str, layer: Any, specs: Mapping[str, TensorSpec]) -> Iterator[Update]:
        """Yield what the active adapters do to the tensors of a module, in PEFT's order."""
        added = layer.trainable_tokens_delta if _class(layer) == _TOKENS else getattr(layer, "scaling", {})
        adapters = [name for name in _active(layer) if name in added and name not in layer.merged_adapters]
        base = f"{path}.base_layer"
        while _is_a(self._modules.get(base), "BaseTunerLayer"):
            base += ".base_layer"
        for adapter in adapters:
            self._refuse_layer(path, layer, adapter, adapters)
            if _class(layer) == _TOKENS:
                trained = f"{path}.trainable_tokens_delta.{adapter}"
                yield token_update(specs, f"{base}.weight", trained, tuple(layer.token_indices[adapter]))
                continue
            weight = f"{base}.{getattr(layer, 'parameter_name', 'weight')}"
            yield weight_update(specs, weight, _factors(path, layer, adapter, specs))
            if (bias := f"{path}.lora_B.{adapter}.bias") in specs:
                yield bias_update(specs, f"{base}.bias", bias, layer.scaling[adapter])

    def _refuse_layer(self, path: str, layer: Any, adapter: str, adapters: Sequence[str]) -> None:
        variant = type(getattr(layer, "lora_variant", {}).get(adapter)).__name__
        has_norms = variant.startswith("Dora")
        found = None
        if _class(layer) not in {*_MERGED, _EXPERTS, _TOKENS}:
            found = _class(layer).removeprefix("peft.tuners.")
        elif not has_norms and variant != "NoneType":
            found = variant
        elif has_norms and len(adapters) > 1:
            found = f"DoRA as one of several active adapters: {listing(adapters)}"
        if found is not None:
            expected = "LoRA or DoRA of a linear, embedding or convolution layer, or of experts"
            what = f"an adapter that cannot be merged: {adapter!r}"
            raise UsageError(what, name=path, expected=expected, found=found, fix=ALONE)


_HAVE_ADAPTERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")


def _factors(path: str, layer: Any, adapter: str, specs: Mapping[str, TensorSpec]) -> Factors:
    is_embedding = _class(layer).endswith(".Embedding")
    part, leaf = ("lora_embedding_", "") if is_embedding else ("lora_", ".weight")
    magnitude = f"{path}.lora_magnitude_vector.{adapter}"
    magnitude += "" if magnitude in specs else ".weight"
    has_experts = _class(layer) == _EXPERTS
    holder, attribute = (layer.get_base_layer(), "is_transposed") if has_experts else (layer, "fan_in_fan_out")
    return Factors(
        f"{path}.{part}A.{adapter}{leaf}",
        f"{path}.{part}B.{adapter}{leaf}",
        layer.scaling[adapter],
        magnitude if magnitude in specs else None,
        is_transposed=is_embedding or bool(getattr(holder, attribute, False)),
        has_experts=has_experts,
        is_embedding=is_embedding,
    )


def _is_tied(tokens: Any) -> bool:
    return tokens.tied_adapter is not None


def _active(module: Any) -> list[str]:
    return list(module.active_adapters)


def _class(module: object) -> str:
    """Return the class of PEFT's that a module is, whatever FSDP has put on top of it."""
    cls = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("peft."))
    return f"{cls.__module__}.{cls.__name__}"


def _is_a(module: object, *names: str) -> bool:
    return any(cls.__name__ in names and cls.__module__.startswith("peft.") for cls in type(module).__mro__)
