"""From rows of files into the memory of a module: each rank what it holds, by several threads, a chunk at a time.

What the module keeps on the CPU in the dtype of the file is read straight into its memory. The rest goes through a
little memory of each thread, pinned where the module is on a GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..compat import pin, unpin
from ..conversion.assembly import Patch
from ..conversion.loading import Loader
from ..conversion.views import View, find_box
from ..errors import SourceError
from ..fence import Operation
from ..sources.stored import StoredSource
from ..spec import Box, TensorSpec
from ..threads import do_all
from ..walk import CHUNK_BYTES, Delivered
from .matching import Fill

__all__ = ["Reading"]

# Of those that copy to a device, each waits for the interpreter more often.
_MAX_THREADS, _MAX_DEVICE_THREADS = 4, 8
# On the CPU what is cast stays in the processor's cache, if it is small.
_CAST_BYTES, _DEVICE_BYTES = 4 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class _Job:
    """Elements of a stored tensor, and the memory that they go to.

    Attributes:
        spec: The stored tensor.
        view: How they lie in it.
        target: A view of the module's memory.
    """

    spec: TensorSpec
    view: View
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, as they are stored."""
        return self.target.numel() * self.spec.dtype.itemsize

    def cut(self, max_bytes: int) -> Iterator[_Job]:
        """Cut it into jobs of a few bytes, along the dim in which elements lie farthest apart."""
        shape = self.target.shape
        wide = [dim for dim, size in enumerate(shape) if size > 1]
        if self.num_bytes <= max_bytes or not wide:
            yield self
            return
        dim = max(wide, key=lambda dim: self.view.strides[dim])
        count = max(max_bytes * shape[dim] // self.num_bytes, 1)
        for first in range(0, shape[dim], count):
            part = self.target.narrow(dim, first, min(count, shape[dim] - first))
            yield from _Job(self.spec, _moved(self.view, dim, first), part).cut(max_bytes)


@dataclass(frozen=True)
class Reading:
    """What a rank reads of a checkpoint into a module.

    Attributes:
        fills: What is loaded.
        source: The checkpoint.
        load: What makes tensors of the module that are computed.
        rank: This process's global rank.
    """

    fills: Sequence[Fill]
    source: StoredSource
    load: Loader
    rank: int

    def check(self) -> None:
        """Refuse what could not be read, before anything is changed. Reads headers alone, and what has copies.

        Raises:
            SourceError: A file is truncated or damaged, or ranks saved different copies.
        """
        for fill in self.fills:
            patches = fill.made.patches
            for patch in _inside(patches, self._block(fill)) if patches is not None else ():
                spec = self._specs[patch.source]
                found = find_box(patch.box.shape, patch.view, spec.shape)
                self.source.check(spec, found[0] if found is not None else _covering(spec, patch.box.shape, patch.view))
            for spec in fill.made.inputs if patches is None else ():
                self.source.check(spec, Box.whole(spec.shape))

    def read(self, locals_: Mapping[str, torch.Tensor], operation: Operation, delivered: Delivered) -> None:
        """Fill this rank's blocks of a module's tensors. Not collective.

        Args:
            locals_: The blocks, by the module's names, in its memory.
            operation: The fence's operation.
            delivered: Called with the bytes of the checkpoint that were just read.

        Raises:
            SourceError: Something cannot be read.
        """
        devices = {local.device for local in locals_.values() if local.device.type != "cpu"}
        reader = _Reader(self.source, devices)
        counting = threading.Lock()

        def do(job: _Job) -> None:
            operation.check()
            reader.do(job)
            with counting:
                delivered(job.num_bytes)

        most = (_MAX_DEVICE_THREADS if devices else _MAX_THREADS) if self.source.is_concurrent else 1
        try:
            jobs = (job for fill in self.fills for job in self._jobs(fill, locals_))
            do_all(do, jobs, most=most, name="fsdp-export-load")
        finally:
            reader.close()
        self._compute(locals_, operation, delivered)

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.source.specs}

    def _block(self, fill: Fill) -> Box:
        return fill.spec.sharding.box(fill.spec.shape, self.rank)

    def _jobs(self, fill: Fill, locals_: Mapping[str, torch.Tensor]) -> Iterator[_Job]:
        local, block = locals_[fill.spec.name], self._block(fill)
        for patch in _inside(fill.made.patches or (), block):
            spec, target = self._specs[patch.source], local[patch.box.slices(block.start)]
            is_direct = target.device.type == "cpu" and target.dtype == spec.dtype
            max_bytes = CHUNK_BYTES if is_direct else _CAST_BYTES if target.device.type == "cpu" else _DEVICE_BYTES
            yield from _Job(spec, patch.view, target).cut(max_bytes)

    def _compute(self, locals_: Mapping[str, torch.Tensor], operation: Operation, delivered: Delivered) -> None:
        """Make what is computed, one group of tensors at a time: each rank reads those that it needs any of whole."""
        groups: dict[tuple[TensorSpec, ...], list[Fill]] = {}
        for fill in self.fills:
            if fill.made.patches is None and locals_[fill.spec.name].numel():
                groups.setdefault(fill.made.inputs, []).append(fill)
        for inputs, fills in groups.items():
            operation.check()
            made = self.load({spec.name: self.source.rows(spec, 0, spec.num_rows) for spec in inputs}).tensors
            delivered(sum(spec.num_bytes for spec in inputs))
            for fill in fills:
                tensor, expected = made.get(fill.name), fill.made.info
                if tensor is None or (tuple(tensor.shape), tensor.dtype) != (expected.shape, expected.dtype):
                    what = "the conversion makes something else of values than was planned"
                    raise SourceError(what, name=fill.name, file=self.source.folder, expected=list(expected.shape))
                block = self._block(fill).slices((0,) * len(fill.spec.shape))
                locals_[fill.spec.name].copy_(tensor.reshape(fill.spec.shape)[block])


def _inside(patches: Iterable[Patch], block: Box) -> Iterator[Patch]:
    for patch in patches:
        inside = patch.within(block)
        if inside is not None:
            yield inside


def _moved(view: View, dim: int, first: int) -> View:
    return View(view.offset + first * view.strides[dim], view.strides)


def _covering(spec: TensorSpec, shape: Sequence[int], view: View) -> Box:
    """Return the rows of a tensor that a view of it reaches into."""
    last = view.offset + sum((size - 1) * stride for size, stride in zip(shape, view.strides, strict=True))
    row = max(math.prod(spec.shape[1:]), 1)
    return Box.whole(spec.shape).of_rows(view.offset // row, last // row + 1)


class _Staging:
    """The memory of one thread for one device, in two parts, one of which is filled while the other is copied there."""

    def __init__(self, device: torch.device, queued: Any) -> None:
        is_cpu = device.type == "cpu"
        self._parts = [
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            for num_bytes in ([_CAST_BYTES] if is_cpu else [_DEVICE_BYTES, _DEVICE_BYTES])
        ]
        self.stream: Any = None
        self._events: list[Any] = [None, None]
        self._turn = 0
        if not is_cpu:
            self.stream = torch.get_device_module(device).Stream(device)
            self.stream.wait_event(queued)
        self._pinned = [part for part in self._parts if pin(part, device)]

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return memory from which nothing is copied any more; new one where a single element or row is larger."""
        self._turn = (self._turn + 1) % len(self._parts)
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()
        part = self._parts[self._turn]
        if num_bytes <= part.numel():
            return part[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: torch.Tensor, memory: torch.Tensor) -> None:
        """Copy to the module's memory what was read, into the memory taken last or other memory that is not pinned."""
        if target.device.type == "cpu":
            target.copy_(memory)
            return
        with self.stream:
            target.copy_(memory, non_blocking=True)
            self._events[self._turn] = self.stream.record_event()

    def close(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            self.stream.synchronize()
        for part in self._pinned:
            unpin(part)


class _Reader:
    """Does jobs, each thread with memory of its own."""

    def __init__(self, source: StoredSource, devices: Iterable[torch.device]) -> None:
        self._source = source
        # What the caller's stream still does with the module comes first; other threads do not know that stream.
        self._queued = {each: torch.get_device_module(each).current_stream(each).record_event() for each in devices}
        self._own = threading.local()
        self._all: list[_Staging] = []

    def do(self, job: _Job) -> None:
        """Read what a job is about."""
        with torch.no_grad(), self._on(job.target):
            found = find_box(job.target.shape, job.view, job.spec.shape)
            if found is None:
                self._read_covering(job)
                return
            box, dims = found
            target = _in_order(job.target, box, dims)
            if target.device.type == "cpu" and target.dtype == job.spec.dtype:
                self._source.read(job.spec, box, target)
            else:
                staging = self._staging(target.device)
                memory = staging.take(job.num_bytes).view(job.spec.dtype).view(box.shape)
                self._source.read(job.spec, box, memory)
                staging.copy(target, memory)

    def close(self) -> None:
        """Wait for all copies."""
        for staging in self._all:
            staging.close()

    def _on(self, target: torch.Tensor) -> AbstractContextManager[object]:
        return torch.get_device_module(target.device).device(target.device) if target.is_cuda else nullcontext()

    def _read_covering(self, job: _Job) -> None:
        """Read whole rows, of which the job wants elements that are no block."""
        box = _covering(job.spec, job.target.shape, job.view)
        rows = torch.empty(box.shape, dtype=job.spec.dtype, device="cpu")
        self._source.read(job.spec, box, rows)
        skipped = box.rows[0] * math.prod(job.spec.shape[1:]) if job.spec.shape else 0
        wanted = rows.as_strided(job.target.shape, job.view.strides, job.view.offset - skipped)
        self._staging(job.target.device).copy(job.target, wanted)

    def _staging(self, device: torch.device) -> _Staging:
        own, key = vars(self._own), str(device)
        if key not in own:
            own[key] = _Staging(device, self._queued.get(device))
            self._all.append(own[key])
        staging: _Staging = own[key]
        return staging


def _in_order(target: torch.Tensor, box: Box, dims: Sequence[int | None]) -> torch.Tensor:
    """Return memory with the dims of the block that goes there."""
    kept = [(dim, position) for position, dim in enumerate(dims) if dim is not None]
    for position in reversed(range(len(dims))):
        if dims[position] is None:
            target = target.squeeze(position)
    order = sorted(range(len(kept)), key=lambda index: kept[index][0])
    target = target.permute(order)
    for dim in range(len(box.start)):
        if dim not in {own for own, _ in kept}:
            target = target.unsqueeze(dim)
    return target
