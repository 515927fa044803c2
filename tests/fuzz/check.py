"""Reads an input in the ways a user would, and judges what came of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from fuzz import libraries
from fuzz.case import Case
from fuzz.limits import MAX_EXTRA_BYTES, guarded, unprivileged, watched
from fuzz.seeds import Run
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_export import export_checkpoint
from fsdp_export.errors import ExportError, UnsafeInputError
from fsdp_export.publish import MARKER
from fsdp_export.sources.base import Source
from fsdp_export.sources.detect import open_source

__all__ = ["Reading", "Way", "WrongError", "check", "export", "export_into", "read", "read_source"]

_WINDOW_BYTES = 1 << 20
_MAX_WINDOWS = 8

Tensors = dict[str, torch.Tensor]


class WrongError(AssertionError):
    """An input that gave neither a right result nor one of our errors."""


@dataclass(frozen=True)
class Reading:
    """What came of an input.

    Attributes:
        tensors: All tensors; None if it was refused.
        error: Why it was refused.
        folder: The folder that was read.
    """

    tensors: Tensors | None
    error: ExportError | None = None
    folder: Path | None = None


Way = Callable[[Case], Reading]
"""Reads a case in one of the ways that users have."""


def check(case: Case, way: Way) -> str:
    """Read a case and say in a word what came of it.

    Args:
        case: The case, already written.
        way: How it is read.

    Raises:
        WrongError: What came of it is neither right nor one of our errors; or it ran something, or took too much.
        Exception: Whatever else reading it has raised.
    """
    logging.getLogger("fsdp_export").setLevel(logging.CRITICAL)
    with (
        guarded() as growth,
        watched(case.folder.parent) as events,
        unprivileged(is_on=case.is_unprivileged and way is not export_into),
    ):
        reading = way(case)
    if events:
        raise WrongError(f"it ran or wrote: {events}")
    if growth[0] > MAX_EXTRA_BYTES:
        raise WrongError(f"it took {growth[0]:,} bytes of memory")
    names_code = case.names_code and len(case.notes) == 1
    if reading.tensors is None:
        if names_code and not isinstance(reading.error, UnsafeInputError):
            raise WrongError(f"a pickle that names code was refused otherwise: {reading.error!r}")
        return "refused"
    if names_code:
        raise WrongError("a pickle that names code was read")
    return _judge(case, reading.tensors, reading.folder)


def read(case: Case) -> Reading:
    """Read all its tensors."""
    try:
        source = open_source(case.folder / case.seed.source)
        try:
            return Reading(read_source(source), None, source.folder)
        finally:
            source.close()
    except ExportError as error:
        str(error).encode("utf-8", "backslashreplace")
        return Reading(None, error)


def read_source(source: Source) -> Tensors:
    """Read every tensor of a source, window by window as an export does; of very large ones only the first rows."""
    tensors = {}
    for spec in source.specs:
        rows = max(_WINDOW_BYTES // max(spec.row_bytes, 1), 1)
        parts = [
            source.rows(spec, first, min(first + rows, spec.num_rows))
            for first in range(0, min(spec.num_rows, _MAX_WINDOWS * rows), rows)
        ]
        parts = parts or [source.rows(spec, 0, 0)]
        assert all(part.dtype == spec.dtype for part in parts)
        tensors[spec.name] = torch.cat([_as_bytes(part) for part in parts]).view(spec.dtype)
        if tensors[spec.name].numel() == torch.Size(spec.shape).numel():
            tensors[spec.name] = tensors[spec.name].reshape(spec.shape)
    return tensors


def export(case: Case) -> Reading:
    """Export it, and read what that wrote with the library."""
    out = case.folder.with_name("out")
    try:
        export_checkpoint(case.folder / case.seed.source, out, fsync=False)
        folder = open_source(case.folder / case.seed.source).folder
    except ExportError as error:
        left = sorted(path.name for path in out.rglob("*")) if out.exists() else []
        if left:
            raise WrongError(f"a failed export left {left}") from error
        return Reading(None, error)
    tensors: Tensors = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors |= load_file(file)
    return Reading(tensors, None, folder)


def export_into(case: Case) -> Reading:
    """Export a sound checkpoint into it, as if it were an earlier export: a failure leaves it as it was."""
    out, before = case.folder / case.seed.source, _contents(case.folder)
    try:
        export_checkpoint(case.seed.folder / case.seed.source, out, fsync=False, overwrite=case.draw.random() < 0.5)
    except ExportError as error:
        left = _contents(case.folder)
        if left != before:
            raise WrongError(f"a failed export changed {sorted(before.items() ^ left.items())}") from error
        return Reading(None, error)
    record = json.loads((out / MARKER).read_bytes())
    tensors: Tensors = {}
    for name in record["files"]:
        tensors |= load_file(out / name) if name.endswith(".safetensors") else {}
    assert tensors.keys() == case.seed.expected.keys()
    return Reading(tensors, None, out)


def _contents(folder: Path) -> dict[str, bytes]:
    small = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 24]
    return {str(path.relative_to(folder)): path.read_bytes() for path in small}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: the stride of a dim of size 1 may be anything, for all that is called contiguous.
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_as_bytes(one), _as_bytes(other))


def _judge(case: Case, found: Tensors, folder: Path | None) -> str:
    """Compare with the values of the seed; where they differ, with what lies where they lay; then ask the library."""
    expected, words = case.seed.expected, set()
    contents: dict[str, bytes | None] = {}
    doubtful = [name for name, tensor in expected.items() if name not in found and tensor.numel()]
    for name, tensor in found.items():
        if name in case.seed.older and _are_equal(tensor, case.seed.older[name]):
            return "of an older step"
        if name in expected and _are_equal(tensor, expected[name]):
            words.add("unchanged")
        elif name in expected and _is_as_stored(case, tensor, name, contents):
            words.add("other values")
        elif not tensor.numel():  # of which nothing but the name is anywhere
            words.add("renamed or reshaped")
        else:
            doubtful.append(name)
    if doubtful:
        return _ask_library(case, found, doubtful, folder)
    return " and ".join(sorted(words)) or "empty"


def _is_as_stored(case: Case, tensor: torch.Tensor, name: str, contents: dict[str, bytes | None]) -> bool:
    """Tell whether every piece of a tensor is what now lies in one of the places where it was."""
    full, runs = case.seed.expected[name], case.seed.runs.get(name)
    if (tensor.shape, tensor.dtype) != (full.shape, full.dtype):
        return False
    if runs is None:
        return True
    data = _as_bytes(tensor).numpy().tobytes()
    return all(_is_run(case, data[run.begin : run.begin + len(run.data)], run, contents) for run in runs)


def _is_run(case: Case, data: bytes, run: Run, contents: dict[str, bytes | None]) -> bool:
    if data == run.data:
        return True
    found = []
    for file, at in run.places:
        if file not in contents:
            path = case.folder / file
            is_small = path.is_file() and path.stat().st_size < 1 << 24
            contents[file] = path.read_bytes() if is_small else None
        content = contents[file]
        # A change of length before another change has moved what that one then hit.
        if content is not None and case.is_rewritten and len(case.notes) > 1 and data in content:
            return True
        found.append((content or b"")[at : at + len(data)])
    # Chunks may each have the whole storage, of which every one stands for its own part.
    return all(
        any(piece[index : index + 1] == data[index : index + 1] for piece in found) for index in range(len(data))
    )


def _ask_library(case: Case, found: Mapping[str, torch.Tensor], doubtful: list[str], folder: Path | None) -> str:
    """Compare with what the library reads; it does not know what to skip, so what it refuses may still be sound."""
    if case.is_rewritten and (case.is_of_two or not case.seed.library):
        return "not judged"
    assert folder is not None
    try:
        truth = libraries.read(case.seed, folder)
    except (Exception, CheckpointException) as error:  # which is no Exception
        if case.is_rewritten:
            return "not judged"
        raise WrongError(f"{doubtful} are not as they were, and the library refuses: {error!r:.300}") from error
    for name in doubtful:
        if name not in found:
            if case.seed.prefix + name in truth:
                raise WrongError(f"{name!r} is missing, and the library has it")
            continue
        candidates = [key for key in truth if key.endswith(name)]
        if not any(_are_equal(found[name], truth[key]) for key in candidates):
            raise WrongError(f"{name!r} is {found[name]}, and the library has {[truth[key] for key in candidates]}")
    return "as the library reads it"
