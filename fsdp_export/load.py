"""Loading: rows of files become the local tensors of a module, whatever the meshes of the two are."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .agreement import agree_on_files, refuse_differences
from .errors import ExportError, SourceError, UsageError, listing
from .fence import Fence, Operation
from .loading.hooks import MadeByHooks, check_hooks
from .loading.lora_scale import warn_of_another_scale
from .loading.matching import Match, match
from .loading.materializing import initial_values, materialize, tensors_on_meta
from .loading.memory import check_memory
from .loading.reading import Reading
from .loading.target import Target, target_of
from .memory import without_collection
from .names import strip_wrappers
from .paths import is_file, is_folder
from .pending import wait_for_latest
from .sources.dcp import DcpSource
from .sources.detect import open_source
from .sources.live import find_ranks
from .sources.rank_files import RankFilesSource
from .sources.stored import StoredSource
from .spec import TensorSpec
from .table import counted, human_bytes
from .ties import are_equal
from .walk import Delivered

__all__ = ["LoadReport", "load"]

_ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoadReport:
    """What was loaded.

    Attributes:
        source: The checkpoint; of a folder above it, the one that was chosen.
        description: What was found there, in words.
        num_tensors: Number of the module's tensors that have new values; tied ones count once.
        num_bytes: Bytes that this rank read of the checkpoint's tensors.
        seconds: How long it took.
        missing: Names that the checkpoint lacks; there are none after `strict=True`.
        unexpected: Names of the checkpoint for which the module has no tensor; as before.
    """

    source: Path
    description: str
    num_tensors: int
    num_bytes: int
    seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        misfits = {"missing": self.missing, "unexpected": self.unexpected}
        lines = [f"found {self.source}: {self.description}"]
        lines += [f"{kind}: {listing(names)}" for kind, names in misfits.items() if names]
        read = f"of which this rank read {human_bytes(self.num_bytes)}, after {self.seconds:.1f} s"
        return "\n".join([*lines, f"loaded {counted(self.num_tensors, 'tensor')}, {read}"])


@dataclass(frozen=True)
class _Plan:
    """What one rank will do."""

    path: Path
    source: StoredSource
    target: Target
    match: Match
    rank: int

    @property
    def reading(self) -> Reading:
        return Reading(self.match.fills, self.source, self.target.load, self.rank)


def load(
    model: nn.Module,
    path: Path,
    *,
    strict: bool,
    cast: bool,
    adapter: Any,
    prefix: str | None,
    device: torch.device | None,
    timeout: float,
    delivered: Delivered,
) -> LoadReport:
    """Load a checkpoint; see `fsdp_export.load_checkpoint`. Collective."""
    if not isinstance(model, nn.Module):
        raise UsageError("nothing to load into", expected="a torch.nn.Module", found=type(model).__name__)
    started, num_bytes = time.perf_counter(), 0

    def count(more: int) -> None:
        nonlocal num_bytes
        num_bytes += more
        delivered(more)

    ranks, rank = find_ranks(model)
    has_begun = False
    try:
        with Fence(ranks, rank, timeout=timeout).operation("load_checkpoint") as operation, ExitStack() as opened:
            wait_for_latest()
            source = opened.enter_context(closing(_opened(path, prefix)))
            operation.agree()  # a hook that makes a state dict may be collective
            plan = _planned(model, path, source, rank, cast=cast, adapter=adapter)
            made = _check(model, plan, ranks, operation, strict=strict)
            values = initial_values(model, _uncovered(model, plan.match, plan.target))
            _agree(plan, ranks, operation, f"strict={strict} cast={cast}")
            if rank == ranks[0] and plan.target.keeps_names:
                warn_of_another_scale(model, plan.source.folder)
            has_begun = True
            materialize(model, device or plan.target.live.device, values)
            _fill(model, plan, made, operation, count)
    except Exception as failure:
        if has_begun:
            raise _in_part(failure) from failure
        raise
    return LoadReport(
        plan.source.folder or path,
        plan.source.description,
        len(plan.match.fills),
        num_bytes,
        time.perf_counter() - started,
        tuple(plan.match.missing),
        tuple(plan.match.unexpected),
    )


def _in_part(failure: Exception) -> ExportError:
    """Return what to raise for an error after which some values are new and others are not."""
    what = "the model is loaded in part and must not be used"
    if isinstance(failure, ExportError):
        return type(failure)(f"{what}: {failure}")
    return SourceError(f"{what}: {type(failure).__name__}: {failure}")


def _opened(path: Path, prefix: str | None) -> StoredSource:
    is_adapter = is_folder(path) and is_file(path / _ADAPTER_FILE) and not is_file(path / "config.json")
    return open_source(path / _ADAPTER_FILE if is_adapter else path, prefix=prefix)


@without_collection()
def _planned(model: nn.Module, path: Path, source: StoredSource, rank: int, *, cast: bool, adapter: Any) -> _Plan:
    """Find out what goes where. Local, but for hooks of the module, and nothing but headers is read."""
    target = target_of(model, [spec.name for spec in source.specs], adapter)
    is_sharded = isinstance(source, (DcpSource, RankFilesSource))
    return _Plan(path, source, target, match(target, source.specs, is_sharded=is_sharded, casts=cast), rank)


def _check(model: nn.Module, plan: _Plan, ranks: Sequence[int], operation: Operation, *, strict: bool) -> set[str]:
    """Look at names, the files that this rank reads, the memory for them, and at a part of what must be equal.

    Returns:
        The names of what hooks make.
    """
    error = plan.match.error(plan.source.folder, strict=strict)
    if error is not None:
        raise error
    plan.reading.check()
    operation.agree()
    shared, made = check_memory(model, partial(_locals, plan))
    # Of what hooks make, ranks may have no rows.
    made = {name for names in operation.agree(json.dumps(sorted(made))) for name in json.loads(names)}
    check_hooks(model, made)
    part, parts = ranks.index(plan.rank), len(ranks)
    for one, other in (*plan.match.twice, *plan.match.sources(shared)):
        rows = (one.num_rows * part // parts, one.num_rows * (part + 1) // parts)
        if not are_equal(plan.source, one, other, rows, operation):
            raise SourceError(
                "two values for weights that the model has tied",
                name=one.name,
                file=plan.source.folder,
                found=f"others than of {other.name!r}",
                fix="Load it into a model whose weights are not tied (tie_word_embeddings=False)",
            )
    return made


def _uncovered(model: nn.Module, found: Match, target: Target) -> list[str]:
    """Return the names of tensors on meta that are not loaded, and so have to be computed.

    Raises:
        SourceError: One of them is a tensor that the checkpoint should have had.
    """
    loaded = {fill.spec.name for fill in found.fills}
    own = {spec.name: name for name, spec in target.specs.items()}
    own |= {alias: alias for alias in target.aliases}
    loaded |= {alias for alias, kept in target.aliases.items() if target.specs[kept].name in loaded}
    on_meta = [
        raw for raw, tensor in tensors_on_meta(model).items() if tensor.numel() and strip_wrappers(raw) not in loaded
    ]
    lacking = [
        own[name] for raw in on_meta if (name := strip_wrappers(raw)) in own and own[name] not in target.optional
    ]
    if lacking:
        raise SourceError(
            "tensors on the meta device that the checkpoint lacks",
            found=listing(lacking),
            fix="Give them values before loading",
        )
    return on_meta


def _agree(plan: _Plan, ranks: Sequence[int], operation: Operation, options: str) -> None:
    """Compare what all ranks are about to load, and into what. Collective.

    Raises:
        DisagreementError: They differ.
    """
    module = sorted((name, spec.shape, str(spec.dtype)) for name, spec in plan.target.specs.items())
    stored = [(spec.name, spec.shape, str(spec.dtype)) for spec in plan.source.specs]
    cards = operation.agree(f"{plan.source.description}, {options} {_digest(stored)} {_digest(module)}")
    what = "the ranks would load different checkpoints, or into different models"
    refuse_differences(
        ranks, cards, what, "Give every rank the same path, which leads to the same files, and the same model"
    )
    agree_on_files(plan.source, plan.path, ranks, operation)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


@torch.no_grad()
def _fill(model: nn.Module, plan: _Plan, names: Collection[str], operation: Operation, delivered: Delivered) -> None:
    """Change the values of the module. Collective."""
    made = MadeByHooks(model, names)
    old = {name: local.clone() for name, local in made.locals_.items()}
    locals_ = _locals(plan) | made.locals_
    plan.reading.read(locals_, operation, delivered)
    for local in locals_.values():
        torch.autograd.graph.increment_version(local)
    operation.agree()
    if names:
        made.load_new(old)


def _locals(plan: _Plan) -> dict[str, torch.Tensor]:
    """Return this rank's blocks of what is loaded, in the module's memory."""
    live = plan.target.live
    live.refresh()
    wanted = {fill.spec.name for fill in plan.match.fills}
    return {spec.name: live.rows(spec, *_rows(spec, plan.rank)) for spec in live.specs if spec.name in wanted}


def _rows(spec: TensorSpec, rank: int) -> tuple[int, int]:
    return spec.sharding.box(spec.shape, rank).rows
