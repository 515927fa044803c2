"""From the path a user names, or stands in, to the checkpoint that is meant."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError, NotFoundError, SourceError, UnsafeInputError, UsageError, listing
from ..paths import is_file, is_folder
from ..publish import MARKER
from . import dcp, hf_files, rank_files, torch_file
from .dcp import DcpSource
from .hf_folder import HfFolderSource
from .rank_files import RankFilesSource
from .stored import StoredSource
from .survey import MAX_DEPTH, Survey, entries
from .torch_file import TorchFileSource

__all__ = ["open_source"]

_log = logging.getLogger("fsdp_export")

_WAY_OUT = "Name the folder of a checkpoint, or make one to try with: fsdp-export --demo --out ckpt/"
_FULL_OF_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?\.bin")


@dataclass(frozen=True, slots=True)
class _Layout:
    """A way in which checkpoints lie in folders.

    Attributes:
        recognizes: Tells from the names of a folder's files whether it is such a checkpoint, or a part of one.
        source: Opens it, and finds out whether it is complete.
    """

    recognizes: Callable[[Collection[str]], bool]
    source: Callable[..., StoredSource]


_DCP = _Layout(dcp.recognizes, DcpSource)
_SHARDED = (
    _DCP,
    _Layout(rank_files.recognizes, RankFilesSource),
    _Layout(hf_files.holds_shards, HfFolderSource),
)
_HUGGING_FACE = _Layout(hf_files.recognizes, HfFolderSource)
_TORCH_FILE = _Layout(torch_file.recognizes, TorchFileSource)
_LAYOUTS = (*_SHARDED, _HUGGING_FACE, _TORCH_FILE)

_OTHERS = (
    (re.compile(r"(zero_pp_rank|mp_rank|bf16_zero_pp_rank)_.*\.pt"), "a checkpoint of DeepSpeed, not read"),
    (re.compile(r"adapter_model\..*"), "an adapter of PEFT: name it to cast or filter it"),
    (re.compile(r".*\.safetensors"), "safetensors: name their folder"),
    (re.compile(r".*\.(bin|pth?|ckpt)"), "a file of torch.save: name it"),
)


def open_source(
    path: Path,
    *,
    prefix: str | None = None,
    ranks: tuple[int, ...] = (0,),
    rank: int = 0,
    device: torch.device | None = None,
) -> StoredSource:
    """Find a checkpoint and open it.

    A folder that is a checkpoint itself, by the names that its files usually have, is taken as it is, whatever lies
    below it. Else the newest complete sharded
    checkpoint at most four levels below is: what a trainer wrote down as its latest step, in a file or link beside its
    steps, counts first, then the epoch and step in the names of folders, and where names have none, the time. A newer
    step that is incomplete is skipped with a warning. Optimizers, which some trainers save beside the model, do not
    count.

    Neither do whole tensors in safetensors that are found on the way: they are base models, or were exported before.
    They have to be named; a folder that `fsdp-export` wrote, if it is named, still comes after sharded checkpoints
    below it. The full state dict of a Trainer (`pytorch_model_fsdp.bin`) counts; what else it has in safetensors beside
    that is the same, and is read. A folder with a config but without weights, like verl's `huggingface/`, is nothing.

    Args:
        path: A checkpoint's folder, one above it, or a file of it.
        prefix: What the model's names begin with in it; None to find out.
        ranks: The global ranks that export together.
        rank: This process's global rank.
        device: Where tensors that are converted are put; default: the CPU.

    Raises:
        NotFoundError: There is no checkpoint, or no model in it.
        UsageError: Several checkpoints, or several prefixes, could be meant.
        SourceError: The checkpoint cannot be read.
        UnsafeInputError: It names code.
    """
    open_as = partial(_open, prefix=prefix, ranks=ranks, rank=rank, device=device)
    if is_file(path):
        kind = _layout_of([path.name]) or (_HUGGING_FACE if path.suffix == ".safetensors" else _TORCH_FILE)
        return open_as(path.parent if kind is _DCP else path, kind)
    if not is_folder(path):
        raise NotFoundError(f"{path} does not exist", fix=_WAY_OUT)
    names = _file_names(path)
    layout = _layout_of(names)
    is_whole = (layout is _HUGGING_FACE and MARKER not in names) or torch_file.holds_model(names)
    if layout is not None and (_counts(names) or is_whole):
        return open_as(path, layout)
    survey = Survey(path, _counts)
    found = _newest(survey, open_as)
    if found is not None:
        return found
    if layout is not None:
        return open_as(path, layout)
    raise _nothing_found(survey)


def _open(folder: Path, layout: _Layout, **options: Any) -> StoredSource:
    return layout.source(folder, **options)


def _file_names(folder: Path) -> list[str]:
    return [entry.name for entry in entries(folder) if not is_folder(entry)]


def _layout_of(names: Collection[str]) -> _Layout | None:
    return next((layout for layout in _LAYOUTS if layout.recognizes(names)), None)


def _counts(names: Collection[str]) -> bool:
    """Tell whether a folder that was not named counts as a checkpoint."""
    return any(layout.recognizes(names) for layout in _SHARDED) or any(map(_FULL_OF_ACCELERATE.fullmatch, names))


def _newest(survey: Survey, open_as: Callable[[Path, _Layout], StoredSource]) -> StoredSource | None:
    """Open the newest complete checkpoint.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        UsageError: There are several.
        SourceError: There are some, but none is complete; the newest one's error.
        NotFoundError: None of them holds a model.
    """
    errors: list[SourceError] = []
    without_model: list[NotFoundError] = []
    for folders in survey.newest_first():
        complete: dict[Path, StoredSource] = {}
        for folder in folders:
            layout = _layout_of(_file_names(folder))
            try:
                if layout is not None:
                    complete[folder] = open_as(folder, layout)
            except UnsafeInputError:
                raise
            except NotFoundError as error:
                without_model.append(error)
            except SourceError as error:
                errors.append(error)
                _log.warning("an incomplete checkpoint is skipped: %s", error)
        if len(complete) > 1:
            found = listing(folder.relative_to(survey.root) for folder in complete)
            what = "several checkpoints that could be meant"
            raise UsageError(what, file=survey.root, found=found, fix="Name one of them")
        for source in complete.values():
            source.num_found = survey.num_models
            return source
    failures: list[ExportError] = [*errors, *without_model]
    if failures:
        raise failures[0]
    return None


def _nothing_found(survey: Survey) -> NotFoundError:
    """Return the error that says what was looked for, and what was there instead."""
    root = survey.root
    if survey.checkpoints:
        found = listing(checkpoint.relative_to(root) for checkpoint in survey.checkpoints)
        return NotFoundError("only optimizer state", file=root, found=found, fix=_WAY_OUT)
    others: dict[str, Path] = {}
    for file in survey.others:
        kind = next((kind for pattern, kind in _OTHERS if pattern.fullmatch(file.name)), None)
        if kind is not None:
            others.setdefault(kind, file.relative_to(root))
    found = listing([f"{file} ({kind})" for kind, file in others.items()] or [entry.name for entry in entries(root)])
    if survey.was_cut_short:
        found += ", in the folders that were looked into"
    return NotFoundError(
        "no sharded checkpoint",
        file=root,
        expected=f"DCP, rank files or shards of safetensors there or up to {MAX_DEPTH} levels below",
        found=found or "nothing",
        fix=_WAY_OUT,
    )
