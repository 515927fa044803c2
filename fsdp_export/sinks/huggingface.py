"""A folder as `save_pretrained` writes it: weights, index, config, tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..dtypes import model_dtype
from ..errors import UsageError
from ..layout import FileLayout, lay_out, split_into_files
from ..plan import Plan
from ..quantization import are_packed
from ..sidecars.fitting import fit_config, undelivered_layers
from ..sidecars.origins import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from ..sidecars.sidecar import Origin, Sidecars
from ..sidecars.writing import write
from ..sizes import is_size
from ..table import human_bytes, summary
from ..verification import Verification
from .files import FileSink, single_file, write_text

__all__ = ["ADAPTER_FILE", "HuggingFaceSink", "Report", "fitted", "folder_layouts", "folder_sink"]

ADAPTER_FILE = "adapter_model.safetensors"
"""What PEFT calls the weights of an adapter."""

_log = logging.getLogger("fsdp_export")
_INDEX = "model.safetensors.index.json"
_KINDS = {
    "config": {CONFIG},
    "generation config": {GENERATION_CONFIG},
    "tokenizer": {"tokenizer.json", TOKENIZER_CONFIG},
}
_WAYS_BACK = "--base-model, or tokenizer= of a live model, writes them"


@dataclass(frozen=True)
class Report:
    """What an export wrote.

    Attributes:
        path: The folder.
        files: Names and sizes in bytes of all files written; on the first rank.
        num_tensors: Number of tensors.
        num_bytes: Bytes of all tensors.
        seconds: From the call to the publication.
        removed: Names of files of an earlier export that are gone; on the first rank.
        notes: What was decided or is missing, a line each; on the first rank.
        what: Tensors, bytes and dtypes in words.
        verification: What came of reading it back; None if that was not asked for.
    """

    path: Path
    files: Mapping[str, int]
    num_tensors: int
    num_bytes: int
    seconds: float
    removed: Sequence[str] = ()
    notes: Sequence[str] = ()
    what: str = ""
    verification: Verification | None = None

    def headline(self) -> str:
        """Return what was written, how big and how fast, in one line."""
        num_files = sum(name.endswith(".safetensors") for name in self.files)
        files = f"{num_files} file" + ("s" if num_files != 1 else "")
        speed = human_bytes(self.num_bytes / max(self.seconds, 1e-9))
        return f"{self.what}, {files} in {self.path} after {self.seconds:.1f} s ({speed}/s)"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return everything a person wants to know; last comes the headline, and what was verified."""
        removed = [f"removed {', '.join(self.removed)} of the earlier export"] if self.removed else []
        verified = self.verification.lines() if self.verification is not None else []
        return [*self.notes, *removed, f"wrote {self.headline()}", *verified]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "path": str(self.path),
            "files": dict(self.files),
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "removed": list(self.removed),
            "notes": list(self.notes),
            **({"verified": self.verification.as_json()} if self.verification is not None else {}),
        }


def folder_layouts(
    format: str,  # noqa: A002  the name that users of this ecosystem expect
    *,
    has_config: bool,
    max_shard_size: int | str,
    is_lora: bool = False,
) -> Callable[[Plan], list[FileLayout]]:
    """Return how a plan is laid out in files; that of an adapter always in one, as PEFT reads it.

    Raises:
        UsageError: The format is none, or the size cannot be read.
    """
    if format not in {"auto", "hf", "safetensors"}:
        raise UsageError("no such format", expected="auto, hf or safetensors", found=format)
    if not is_size(str(max_shard_size)) or isinstance(max_shard_size, (bool, float)):
        fix = "Give bytes, or a number with KB, MB, GB or TB (decimal)"
        raise UsageError("a shard size that cannot be read", found=repr(max_shard_size), fix=fix)
    if is_lora:
        return _lora_file
    if format == "safetensors" or (format == "auto" and not has_config):
        return single_file
    return partial(_split, max_shard_size=max_shard_size)


def folder_sink(
    folder: Path,
    *,
    format: str,  # noqa: A002  the name that users of this ecosystem expect
    has_config: bool,
    sidecars: Callable[[], Sidecars],
    tokenizer: Callable[[Sidecars], None] | None = None,
    max_shard_size: int | str,
    overwrite: bool,
    fsync: bool,
    provenance: Callable[[], Mapping[str, object]],
    is_lora: bool = False,
    make: Callable[..., HuggingFaceSink] | None = None,
) -> HuggingFaceSink:
    """Return the sink of a format.

    `"auto"` is `"hf"` where there is a config; where there is none, what else was found stands beside the one file.

    Args:
        folder: The folder to write.
        format: `"auto"`, `"hf"` or `"safetensors"`.
        has_config: Whether there is a config.
        sidecars: Returns what lies beside the weights in a Hugging Face folder.
        tokenizer: Adds the tokenizer to it, if it has none.
        max_shard_size: Bytes per file of it.
        overwrite: Whether weights that no export recorded are replaced.
        fsync: Whether to wait until the disk has the bytes.
        provenance: Tells what the export was made from; called on the first rank.
        is_lora: Whether the tensors are an adapter.
        make: Makes the sink, which may do more; default: `HuggingFaceSink`.

    Raises:
        UsageError: As `folder_layouts`; or the format is `"hf"` and there is no config.
    """
    lay_out_files = folder_layouts(format, has_config=has_config, max_shard_size=max_shard_size, is_lora=is_lora)
    if not (has_config or is_lora) and format == "hf":
        raise UsageError("no config for a Hugging Face folder", fix="Give --base-model, or --format safetensors")
    return (make or HuggingFaceSink)(
        folder,
        lay_out_files=lay_out_files,
        sidecars=sidecars if format != "safetensors" else None,
        tokenizer=tokenizer if format != "safetensors" else None,
        overwrite=overwrite,
        fsync=fsync,
        provenance=provenance,
        kind="LoRA adapter" if is_lora else "",
    )


class HuggingFaceSink(FileSink):
    """Writes weights as `FileSink` does, and beside them index, config, tokenizer.

    Args:
        folder: As for `FileSink`, and so are `lay_out_files`, `overwrite`, `fsync` and `provenance`.
        sidecars: Finds config and so on; called on the first rank, in `begin`. None to write weights alone.
        tokenizer: Adds the tokenizer; called on the first rank, in `commit`, since it takes long.
        kind: What is written, for the report, if it is no model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lay_out_files: Callable[[Plan], list[FileLayout]],
        sidecars: Callable[[], Sidecars] | None,
        tokenizer: Callable[[Sidecars], None] | None,
        overwrite: bool,
        fsync: bool,
        provenance: Callable[[], Mapping[str, object]],
        kind: str = "",
    ) -> None:
        super().__init__(folder, lay_out_files=lay_out_files, provenance=provenance, overwrite=overwrite, fsync=fsync)
        self._find_sidecars = sidecars
        self._add_tokenizer = tokenizer
        self._kind = kind
        self._sidecars = Sidecars()

    def begin(self, plan: Plan, cards: Sequence[str]) -> str:
        """Decide on the sidecars, then as `FileSink.begin`."""
        if self._find_sidecars is not None:
            self._sidecars = fitted(self._find_sidecars(), plan)
        return super().begin(plan, cards)

    def write_extras(self, staging: Path, plan: Plan) -> dict[str, Mapping[str, object]]:
        """Write the index and the sidecars."""
        if self._add_tokenizer is not None:
            self._add_tokenizer(self._sidecars)
        digests = write(self._sidecars, staging, fsync=self.fsync)
        origins = {sidecar.name: sidecar.origin for sidecar in reversed(self._sidecars.files)}
        if len(self.layouts) > 1:
            text = json.dumps(_index(plan, self.layouts), indent=2, sort_keys=True) + "\n"
            write_text(staging / _INDEX, text)
            digests[_INDEX] = hashlib.sha256(text.encode()).hexdigest()
            origins[_INDEX] = Origin("fsdp-export")
        return {name: {"sha256": digest, **origins[name].as_json()} for name, digest in digests.items()}

    def report(self, plan: Plan, seconds: float) -> Report:
        """Tell what the last export wrote."""
        missing = [f"not written: {what}" for what in self._sidecars.missing]
        lost = self._lost_kinds()
        if lost and self._find_sidecars is not None:
            missing.append(f"gone with the earlier export, and not replaced: {', '.join(lost)}; {_WAYS_BACK}")
        return Report(
            path=self.destination,
            files=self.written,
            num_tensors=len(plan.outputs),
            num_bytes=plan.num_bytes,
            seconds=seconds,
            removed=self.removed,
            notes=[*self._sidecars.warnings, *missing],
            what=", ".join(filter(None, (self._kind, summary(plan.outputs)))),
        )

    def _lost_kinds(self) -> list[str]:
        """Return what the folder had beside its weights and has no more."""
        removed, written = set(self.removed), self.written.keys()
        return [kind for kind, names in _KINDS.items() if removed & names and not written & names]


def fitted(sidecars: Sidecars, plan: Plan) -> Sidecars:
    """Return sidecars with a config that is true to the tensors of a plan, and with what to know of them."""
    dtype, is_uniform = model_dtype(plan.outputs, plan.casts)
    tied = False if plan.untied else plan.are_tied_by_hand or None
    quantized = None if are_packed(plan.outputs) else False
    fit = fit_config(sidecars, dtype=dtype, is_uniform=is_uniform, tied=tied, quantized=quantized)
    fit.warnings += undelivered_layers(fit.config or {}, (output.name for output in plan.outputs))
    return fit


def _lora_file(plan: Plan) -> list[FileLayout]:
    return [lay_out(ADAPTER_FILE, plan.outputs)]


def _split(plan: Plan, max_shard_size: int | str) -> list[FileLayout]:
    return split_into_files(plan.outputs, max_shard_size, plan.blocks)


def _index(plan: Plan, layouts: Sequence[FileLayout]) -> dict[str, object]:
    inputs = {spec for step in plan.steps for spec in step.inputs if spec not in step.merged}
    num_parameters = sum(math.prod(spec.shape) for spec in inputs if not spec.is_buffer)
    return {
        "metadata": {"total_parameters": num_parameters, "total_size": plan.num_bytes},
        "weight_map": {name: layout.name for layout in layouts for name in layout.offsets},
    }
