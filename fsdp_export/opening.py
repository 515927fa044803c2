"""From a path to an opened checkpoint, and what is decided on the way: names, dtypes, config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .agreement import agree_on_files
from .checkpoint import OpenedCheckpoint
from .config_json import named_dtype
from .conversion.adapter import adapter_name, conversion_of, load_adapter
from .conversion.cut import Conversion
from .conversion.full_precision import stored_in_fp32
from .conversion.lora_view import LoraView
from .conversion.shapes import compare_with_config
from .conversion.transformers import HubConversion, HubForm, convert_stored
from .conversion.twin import class_name, has_custom_code, meta_twin
from .dtype_notes import dtype_notes
from .dtypes import DtypePolicy
from .errors import UsageError, listing
from .exporter import Exporter
from .fence import Fence
from .lora import describe_lora, find_lora, merged_view
from .sidecars.of_folder import from_folder
from .sidecars.origins import CONFIG
from .sidecars.sidecar import Sidecars
from .sources.base import Source
from .sources.detect import open_source
from .sources.hf_folder import names_in
from .spec import TensorSpec
from .table import dtype_name
from .ties import config_ties, tied_names

__all__ = ["open_checkpoint"]


def open_checkpoint(
    source: str | PathLike[str],
    *,
    base_model: str | PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype = "keep",
    keep_dtype: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: Any = None,
    trust_remote_code: bool = False,
    lora: str = "auto",
    device: torch.device | str | None = None,
    format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
    ranks: tuple[int, ...] = (0,),
    rank: int = 0,
) -> OpenedCheckpoint:
    """Find and open a checkpoint on disk. Collective among `ranks`, which will share the writing.

    Args:
        source: As in `export_checkpoint`, and so are the others.
        base_model: See there.
        prefix: See there.
        dtype: See there.
        keep_dtype: See there.
        include: See there.
        exclude: See there.
        adapter: See there.
        trust_remote_code: See there.
        lora: See there.
        device: See there.
        format: What will be written. With `"safetensors"` the config need not fit the tensors.
        ranks: The global ranks that export together; `(0,)` without a process group.
        rank: This process's global rank.

    Raises:
        ExportError: It cannot be read on some rank; the same error is raised on all.
    """
    base = os.fspath(base_model) if base_model is not None else None
    with Fence(ranks, rank).operation("open_checkpoint") as operation:
        opened = open_source(Path(source), prefix=prefix, ranks=ranks, rank=rank, device=_usable(device))
        agree_on_files(opened, Path(source), ranks, operation)
        found = find_lora(opened, lora, is_converted=adapter is not None)
        is_lora, notes = found.is_adapter, found.notes
        if rank != ranks[0]:
            operation.agree()
        sidecars = from_folder(opened.folder, base)
        if rank == ranks[0]:
            # What had to be downloaded is there now, and the other ranks need not do it too.
            operation.agree()
        config = sidecars.config or {}
        if dtype == "auto" and is_lora:  # it is small, and its base model's dtype is not its own
            dtype = "keep"
        policy = _narrowing_to(named_dtype(config)) if dtype == "auto" else DtypePolicy.parse(dtype)
        twin = _twin(opened, sidecars, trust_remote_code=trust_remote_code) if config and not is_lora else None
        view = merged_view(opened, found.state, twin, notes) if found.state is not None else None
        specs = opened.specs if view is None else view.specs
        hub = _hub_form(twin, specs, sidecars) if twin is not None else None
        is_kept = found.is_there and view is None
        conversion = _conversion(adapter, specs, sidecars, None if is_kept else hub, opened.folder)
        origins = _origins(specs, conversion, view)
        aliases, untied = tied_names(opened, origins, hub, operation)
        in_fp32 = stored_in_fp32(hub, origins, policy.target) if hub is not None else frozenset[str]()
        exporter = Exporter(
            opened,
            dtype=policy,
            keep_dtype=keep_dtype,
            include=include,
            exclude=exclude,
            adapter=conversion,
            lora=view or "keep",
            aliases=aliases,
            untied=untied,
            in_fp32=in_fp32,
        )
        is_converted = isinstance(conversion, HubConversion) and conversion.num_converted != (0, 0)
        heeds_config = bool(policy.only_narrow or aliases or untied or is_converted or in_fp32)
        notes += [
            *_cast_notes(exporter, policy),
            *([] if is_lora else dtype_notes(exporter.plan, [named_dtype(config)])),
        ]
        notes += _pattern_notes(exporter, include=include, exclude=exclude, keep_dtype=keep_dtype)
        notes += [f"{alias} is tied to {kept} and left out" for alias, kept in aliases.items()]
        notes += _conversion_notes(conversion, hub, config, is_lora=is_lora)
        lacks = None
        if is_lora:
            sidecars, lacks = describe_lora(opened, exporter.plan.outputs, sidecars, base)
        elif format != "safetensors":
            sidecars = _fit_to_shapes(sidecars, exporter, origins, hub, notes)
    return OpenedCheckpoint(
        opened,
        exporter,
        sidecars,
        base,
        heeds_config,
        notes,
        is_lora=is_lora,
        has_lora=found.is_there,
        lacks=lacks,
        declared_ties=config_ties(hub) if hub is not None else {},
    )


def _usable(device: torch.device | str | None) -> torch.device | None:
    """Return a device on which there can be tensors.

    Raises:
        UsageError: This is none.
    """
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # torch lacks it, or there is none
        raise UsageError(
            "a device that cannot be used here", found=device, fix="Leave it out to use the CPU"
        ) from error
    return torch.device(device)


def _narrowing_to(named: str | None) -> DtypePolicy:
    """Return the policy that casts to a dtype what is wider; one to which nothing is cast, or none, changes nothing."""
    try:
        target = DtypePolicy.parse(named or "keep").target
    except UsageError:
        target = None
    return DtypePolicy(target, only_narrow=target is not None)


def _cast_notes(exporter: Exporter, policy: DtypePolicy) -> list[str]:
    """Tell what the config, and not the user, has decided."""
    cast = [step for step in exporter.plan.steps if any(output.dtype == policy.target for output in step.outputs)]
    dtypes = {spec.dtype for step in cast for spec in step.inputs}
    wider = sorted(dtype_name(dtype) for dtype in dtypes if policy.cast_of(dtype) is not None)
    if not (policy.only_narrow and wider):
        return []
    target = dtype_name(policy.target)
    return [f"{' and '.join(wider)} becomes {target}, as the config says (--dtype keep to keep it)"]


def _pattern_notes(exporter: Exporter, **options: Sequence[str]) -> list[str]:
    hits = exporter.pattern_hits
    return [
        f"{option.replace('_', '-')} {pattern}: {hits[pattern]:,} of {exporter.num_available:,} tensors"
        for option, patterns in options.items()
        for pattern in ((patterns,) if isinstance(patterns, str) else patterns)
    ]


def _twin(source: Source, sidecars: Sidecars, *, trust_remote_code: bool) -> nn.Module | None:
    """Build the model of a config; None for a class that is not known."""
    code = sidecars.config_file.parent if trust_remote_code and sidecars.config_file is not None else None
    return meta_twin(sidecars.config or {}, len(source.specs), code=code)


def _hub_form(twin: nn.Module, specs: Iterable[TensorSpec], sidecars: Sidecars) -> HubForm:
    """Return the form that the model of a config has on the hub."""
    return HubForm(twin, _base_names(sidecars, None) | {spec.name for spec in specs})


def _base_names(sidecars: Sidecars, folder: Path | None) -> frozenset[str]:
    """Return the names of the tensors beside the config, unless that is in the folder of the checkpoint itself."""
    place = sidecars.config_file.parent if sidecars.config_file is not None else None
    return names_in(place) if place is not None and place != (folder and folder.resolve()) else frozenset()


def _conversion(
    adapter: Any, specs: Sequence[TensorSpec], sidecars: Sidecars, hub: HubForm | None, folder: Path | None
) -> Conversion | None:
    """Plan what an adapter, or one that a string names, does to a checkpoint; or else what transformers does."""
    if adapter is None:
        return convert_stored(hub, specs, folder) if hub is not None else None
    if isinstance(adapter, str):
        places = [sidecar.content for sidecar in sidecars.files if sidecar.name == CONFIG]
        assets = next((place.parent for place in places if isinstance(place, Path)), None)
        loaded = load_adapter(adapter, config=sidecars.config, assets=assets)
        return Conversion(conversion_of(loaded), specs, adapter_name(adapter))
    return Conversion(conversion_of(adapter), specs, adapter_name(adapter))


def _conversion_notes(
    conversion: Conversion | None, hub: HubForm | None, config: Mapping[str, Any], *, is_lora: bool
) -> list[str]:
    """Tell what becomes of the names."""
    if isinstance(conversion, HubConversion):
        num_inputs, num_outputs = conversion.num_converted
        made = f"{num_inputs:,} tensors become {num_outputs:,} of the hub's names, as {hub and hub.class_name} is saved"
        return [made] if num_outputs else []
    if conversion is not None:
        unused = conversion.unused
        return [f"the adapter makes nothing of {len(unused):,}: {listing(unused)}"] if unused else []
    if not config or is_lora or hub is not None:
        return []
    if find_spec("transformers") is None:
        return ["transformers is not installed, so names stay as they are"]
    name = class_name(config) or config.get("model_type")
    way_out = " (--trust-remote-code runs the code that the config names)" if has_custom_code(config) else ""
    return [f"transformers has no class {name} that takes this config, so names stay as they are{way_out}"]


def _origins(
    specs: Iterable[TensorSpec], conversion: Conversion | None, view: LoraView | None
) -> dict[str, TensorSpec | None]:
    """Map the names that can be exported to the source's tensors that they are; None for what is made of others."""
    if conversion is not None:
        seen = {name: conversion.origin(name) for name in conversion.names}
    else:
        seen = {spec.name: spec for spec in specs}
    return seen if view is None else {name: spec and view.origin(spec.name) for name, spec in seen.items()}


def _fit_to_shapes(
    sidecars: Sidecars, exporter: Exporter, names: Iterable[str], hub: HubForm | None, notes: list[str]
) -> Sidecars:
    """Return the sidecars with a config that fits the shapes; add what was noticed to the notes.

    Raises:
        SourceError: No config fits them.
    """
    comparison = compare_with_config(
        exporter.plan.outputs,
        list(names),
        hub,
        sidecars.config or {},
        folder=exporter.source.folder,
        config_file=sidecars.config_file,
        base_names=_base_names(sidecars, exporter.source.folder),
    )
    if comparison.error is not None:
        raise comparison.error
    notes += comparison.notes
    return replace(sidecars, edits=comparison.edits)
