"""Whether the tensors of a checkpoint are those of the model that its config describes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config_json import Edits, edit_json, vocab_edits
from ..errors import SourceError, listing
from ..quantization import are_packed, is_quantized
from ..spec import TensorInfo
from ..table import counted
from .known import KnownTensors, Shape
from .transformers import HubForm
from .twin import has_custom_code, meta_twin

__all__ = ["Comparison", "compare_with_config"]

Misfits = Sequence[tuple[TensorInfo, Shape]]

_OTHER_BASE = "Give a --base-model whose config fits, or leave the tensor out with --exclude"


@dataclass(frozen=True)
class Comparison:
    """What came of comparing a checkpoint with its config.

    Attributes:
        edits: What makes the config fit the tensors.
        notes: What a user should know, a line each.
        error: Why no model of this config can hold the tensors.
    """

    edits: Edits = field(default_factory=dict)
    notes: Sequence[str] = ()
    error: SourceError | None = None


def compare_with_config(
    outputs: Sequence[TensorInfo],
    names: Iterable[str],
    hub: HubForm | None,
    config: Mapping[str, Any],
    *,
    folder: Path | None,
    config_file: Path | None,
    base_names: Collection[str] = (),
) -> Comparison:
    """Compare what will be written with what the config's class has. Local, and no value is looked at.

    A vocabulary of another size, if it is all that differs, is an edit of the config: embeddings are resized as
    models are trained. No shapes are compared where weights are packed or where the config names code of its own, and
    no names where there are parts of an adapter.

    Args:
        outputs: The tensors that will be written.
        names: All names of the checkpoint, those included that will not be written.
        hub: The form of the config's model on the hub, if there is such a model.
        config: The parsed `config.json`.
        folder: The checkpoint, for messages.
        config_file: Where the config was read, for messages.
        base_names: The names of the tensors of the base model, as far as they are known.
    """
    written = {*names, *(output.name for output in outputs)}
    if hub is None or has_custom_code(config) or (is_quantized(config) and are_packed(outputs)):
        return Comparison(notes=_notes_on_base(base_names, written, None))
    known = KnownTensors(hub)
    notes = _notes_on_names(outputs, written, known, hub.class_name)
    notes += _notes_on_base(base_names, written, known) if not is_quantized(config) else []
    misfits = _misfits(outputs, known)
    edits = _resized_vocabulary(misfits, outputs, config)
    if misfits and not edits:
        place = str(config_file or "config.json")
        return Comparison(notes=notes, error=_error(misfits, outputs, _vocab_size(hub.twin), folder, place))
    if edits:
        output, expected = misfits[0]
        rows = listing(output.name for output, _ in misfits)
        notes.append(
            f"vocab_size in config.json becomes {output.shape[0]}, the number of rows of {rows}; it was {expected[0]}"
        )
    return Comparison(edits, notes)


def _notes_on_base(base_names: Collection[str], names: Collection[str], known: KnownTensors | None) -> list[str]:
    """Tell what of the base model the checkpoint lacks and its class, if it is known, does not miss: draft heads."""
    lacking = [name for name in base_names if name not in names]
    if known is not None:
        lacking = known.unknown(lacking, are_ignored_too=True)
    elif len(lacking) * 2 > len(base_names):  # they are of another form, and say nothing
        return []
    tensors = counted(len(lacking), "tensor")
    return [f"the base model has {tensors} that the checkpoint lacks: {listing(lacking)}"] if lacking else []


def _notes_on_names(
    outputs: Iterable[TensorInfo], all_names: Collection[str], known: KnownTensors, class_name: str
) -> list[str]:
    written = [output.name for output in outputs]
    if any(segment.startswith("lora_") for name in written for segment in name.split(".")):
        return [f"LoRA is not merged: {class_name} will not load these names; --lora merge merges it"]
    missing, unknown = known.missing(all_names), known.unknown(written)
    num_known = sum(known.find(name) is not None for name in all_names)
    if missing and num_known * 2 < len(all_names):
        way_out = "--adapter converts names, and --prefix leaves out how they begin"
        facts = f"found {listing(unknown, 2)}, expected {listing(missing, 2)}"
        how_many = "none" if not num_known else f"only {num_known:,} of {len(all_names):,}"
        verb = "is one" if num_known < 2 else "are ones"  # noqa: PLR2004 - one
        return [f"{how_many} of the names {verb} of {class_name}: {facts}; {way_out}"]
    lacks, more = counted(len(missing), "tensor"), counted(len(unknown), "tensor")
    notes = [f"{class_name} has {lacks} that the checkpoint lacks: {listing(missing)}"] if missing else []
    if unknown:
        notes.append(f"{class_name} does not know {more} of the checkpoint: {listing(unknown)}")
    if missing and unknown:
        notes.append(
            "whoever loads this gets new values for what is lacking: is the base model the one that was trained?"
        )
    return notes


def _misfits(outputs: Iterable[TensorInfo], known: KnownTensors) -> Misfits:
    expected = ((output, known.expected_shape(output)) for output in outputs)
    return [(output, shape) for output, shape in expected if shape is not None]


def _resized_vocabulary(misfits: Misfits, outputs: Sequence[TensorInfo], config: Mapping[str, Any]) -> Edits:
    """Return the edits of `vocab_size` after which every tensor fits, if there are such."""
    sizes = {(output.shape[0], shape[0]) if _has_other_rows(output, shape) else (0, 0) for output, shape in misfits}
    if len(sizes) != 1 or (0, 0) in sizes:
        return {}
    new, old = sizes.pop()
    edits = vocab_edits(config, old, new)
    twin = meta_twin(json.loads(edit_json(json.dumps(config), edits)), len(outputs), warns=False)
    return edits if twin is not None and not _misfits(outputs, KnownTensors(HubForm(twin))) else {}


def _has_other_rows(output: TensorInfo, shape: Shape) -> bool:
    return bool(output.shape and shape) and output.shape[0] > 0 and output.shape[1:] == shape[1:]


def _vocab_size(twin: Any) -> int | None:
    try:
        return getattr(twin.config.get_text_config(), "vocab_size", None)
    except ValueError:  # there are several text models
        return None


def _error(
    misfits: Misfits, outputs: Iterable[TensorInfo], vocab_size: int | None, folder: Path | None, config_file: str
) -> SourceError:
    """Describe the worst of the misfits: a flat shard, then any, then a vocabulary that is of several sizes."""
    flat = [misfit for misfit in misfits if _looks_flat(*misfit)]
    others = [(each, shape) for each, shape in misfits if not (_has_other_rows(each, shape) and shape[0] == vocab_size)]
    output, expected = (flat or others or misfits)[0]
    if not (flat or others):
        sizes = {each.name: each.shape[0] for each, _ in misfits if each.shape[0] != output.shape[0]}
        sizes |= {each.name: each.shape[0] for each in outputs if each.shape == expected}
        found = f"{output.shape[0]}" + "".join(f", but {size} of {name!r}" for name, size in sorted(sizes.items())[:1])
        return SourceError(
            "a vocabulary that does not fit the config",
            name=output.name,
            file=folder,
            expected=f"{expected[0]} rows, the vocab_size of {config_file}",
            found=found,
            fix=_OTHER_BASE,
        )
    more = len(misfits) - 1
    return SourceError(
        "what looks like an unflattened FSDP1 shard" if flat else "a shape that disagrees with the config",
        name=output.name,
        file=folder,
        expected=f"{expected} as {config_file} has it",
        found=f"{output.shape}" + (f", and {more:,} more that disagree" if more else ""),
        fix="Save with StateDictType.SHARDED_STATE_DICT, or train with fully_shard (FSDP2)" if flat else _OTHER_BASE,
    )


def _looks_flat(output: TensorInfo, shape: Shape) -> bool:
    return len(output.shape) == 1 < len(shape) and output.shape[0] <= math.prod(shape)
