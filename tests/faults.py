"""Exports with a fault on one rank: what every rank raises, and what is left of the folder and the process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from models import shard
from publish_faults import tree
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from fsdp_export import Exporter
from fsdp_export.fence import operation
from fsdp_export.sinks.files import FileSink

__all__ = [
    "FOREVER",
    "NUM_RANKS",
    "Outcome",
    "before_call",
    "check_complete",
    "export_again",
    "export_with_fault",
    "layered",
    "make_old_export",
    "outcome_of",
    "the_error",
]

FOREVER = 3600.0
"""Seconds; whoever waits for that long hangs."""

NUM_RANKS = 3

Inject = Callable[[Exporter, FileSink], object]
"""Prepares a fault on a rank; called on every rank."""


class Outcome(NamedTuple):
    """What a call raised.

    Attributes:
        kind: The name of its class, or `"ok"`.
        text: Its message.
    """

    kind: str
    text: str


def layered(width: int = 3) -> nn.Sequential:
    """Return a model of 72 * `width`**2 bytes whose tensors have rows, and columns, for three ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(ins * width, outs * width) for ins, outs in ((2, 3), (3, 2), (2, 3))))


def make_old_export(folder: Path, width: int = 3) -> None:
    """Export other values of the model, and put other files beside them."""
    model = layered(width)
    nn.init.zeros_(next(model.parameters()))
    Exporter(model).save(folder, format="safetensors")
    (folder / "notes.txt").write_text("mine")


def before_call(target: object, method: str, act: Callable[[], object], *, number: int = 0) -> None:
    """Let something happen before the call of this number, counted from 0, of a method of an object."""
    original, numbers = getattr(target, method), itertools.count()

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(numbers) == number:
            act()
        return original(*args, **options)

    setattr(target, method, wrapped)


def outcome_of(call: Callable[[], object]) -> Outcome:
    """Return what a call raises. After a failure, the first rank hangs if it waits for one that will not come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "PATIENCE_SECONDS", FOREVER)
        try:
            call()
        except BaseException as error:  # noqa: BLE001  an interrupt is an outcome
            return Outcome(type(error).__name__, str(error))
    return Outcome("ok", "")


def the_error(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the class and the message of the error that every rank raised."""
    (outcome,) = set(outcomes)
    return outcome


def check_complete(folder: Path, width: int = 3) -> None:
    expected = expected_export(layered(width))
    saved = load_file(folder / "model.safetensors")
    assert_same({name: saved.pop(name) for name in expected}, expected)
    assert not saved
    assert not list(folder.glob(".*"))


def export_again(exporter: Exporter, sink: FileSink, width: int = 3) -> None:
    """Show that the process group, if there is one, works, and that an export succeeds and is complete. Collective."""
    if dist.is_initialized():
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == dist.get_world_size()
    exporter.send(sink)
    check_complete(sink.folder, width)


def export_with_fault(
    folder: Path,
    inject: Inject,
    *,
    layout: str = "1d",
    width: int = 3,
    fsync: bool = False,
    export: Callable[[Exporter, FileSink], object] = Exporter.send,
    **options: Any,
) -> list[Outcome]:
    """Export over an earlier export with a fault, find that one intact, then export with the same objects.

    Args:
        folder: Where the earlier export is.
        inject: Prepares the fault, which must not come twice.
        layout: For `models.shard`; `1d` holds every tensor, `dim1` gathers the matrices.
        width: For `layered`.
        fsync: For the sink.
        export: What is called.
        **options: For `run_ranks`.

    Returns:
        What `export` raised on each rank.
    """
    before = tree(folder)

    def on_rank() -> Outcome:
        exporter = Exporter(
            shard(layered(width), layout, dist.get_world_size()), bucket_bytes=256 if width == 3 else None
        )
        sink = FileSink(folder, fsync=fsync)
        inject(exporter, sink)
        outcome = outcome_of(lambda: export(exporter, sink))
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        export_again(exporter, sink, width)
        return outcome

    return run_ranks(on_rank, NUM_RANKS, **options)
