"""Which memory a walk ties to which streams: tensors have no data here, and streams are stand-ins.

What this keeps from happening on a real device is in `test_gpu.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streams import DeviceModule, Stream
from torch.overrides import TorchFunctionMode

from fsdp_export.fence import Operation
from fsdp_export.gather import Gather
from fsdp_export.lockstep import GatheredBucket, _blocks, _side_streams, gathered_buckets
from fsdp_export.plan import BucketPlan
from fsdp_export.spec import Mesh, Sharding, TensorSpec
from fsdp_export.steps import Window, copy_step

DEVICE = torch.device("meta")
MESH = Mesh((0, 1, 2, 3), (2, 2))


class Ties(TorchFunctionMode):
    """Notes which tensors are tied to which streams, and on which the memory of an operator's result is taken."""

    def __init__(self, module: DeviceModule) -> None:
        super().__init__()
        self._module = module
        self.tied: list[tuple[torch.Tensor, Stream]] = []
        self.taken: list[tuple[torch.Tensor, Stream]] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.taken.append((result, self._module.current[-1]))
        return result

    def streams_of(self, tensor: torch.Tensor) -> list[Stream]:
        return [stream for tied, stream in self.tied if tied is tensor]

    def taken_on(self, tensor: torch.Tensor) -> Stream:
        return next(stream for taken, stream in self.taken if taken is tensor)


class Memory:
    """A source whose blocks lie on the device: of every other tensor a quarter, of the rest all."""

    rank, groups = 0, {(MESH, axis): None for axis in range(2)}

    def __init__(self, device: torch.device = DEVICE, folder: Path | None = None) -> None:
        self.device, self.folder = device, folder
        shardings = [Sharding(MESH, ((0, 0), (1, 1))), Sharding(MESH)]
        self.specs = [TensorSpec(f"t{i}", (4, 2), torch.float32, shardings[i % 2]) for i in range(6)]
        self.blocks = [torch.empty(spec.sharding.box(spec.shape, 0).shape, device=device) for spec in self.specs]

    def rows(self, spec: TensorSpec, *_: int) -> torch.Tensor:
        return self.blocks[self.specs.index(spec)]

    def buckets(self) -> list[BucketPlan]:
        pairs = zip(self.specs[::2], self.specs[1::2], strict=True)
        return [BucketPlan([Window(copy_step(spec), ((0, 4),)) for spec in pair]) for pair in pairs]


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A walk of three buckets of a tensor that is sharded and one that is not, and all that it did."""
    module = DeviceModule(monkeypatch)
    _side_streams.cache_clear()
    launched: list[Gather] = []

    def launch(gather: Gather) -> None:
        launched.append(gather)
        if len(launched) == seen.fails_at:
            raise RuntimeError("the collective failed")

    monkeypatch.setattr(Gather, "launch", launch)
    source: Any = Memory()
    ties = Ties(module)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *pair: ties.tied.append(pair))
    with ties:
        generator: Any = gathered_buckets(source.buckets(), source, Operation())
        _, gathers = _side_streams(DEVICE)
        seen = SimpleNamespace(source=source, module=module, launched=launched, ties=ties, fails_at=None)
        seen.buckets, seen.gathers, seen.consumer = generator, gathers, module.current[0]
        yield seen
        generator.close()
    _side_streams.cache_clear()


def test_what_is_gathered_is_of_the_consumers_stream_and_tied_to_no_other(walk):
    buckets: list[GatheredBucket] = list(walk.buckets)
    assert len(buckets) == 3
    for bucket, gather in zip(buckets, walk.launched, strict=True):
        sharded, copied = bucket.tensors
        assert gather.outputs is bucket.tensors
        assert walk.ties.taken_on(sharded) is walk.consumer
        (between,) = gather._sends[0].outputs
        for own in (between, gather._scratch):
            assert walk.ties.taken_on(own) is walk.gathers
        assert walk.ties.streams_of(sharded) == []
        assert walk.ties.streams_of(copied) == [walk.gathers, walk.consumer]
        assert not bucket.read
    assert all(walk.ties.streams_of(block) == [] for block in walk.source.blocks)
    assert walk.consumer in walk.gathers.waits_for


def test_what_is_taken_on_another_stream_is_tied_to_that(walk):
    next(walk.buckets)
    with walk.module.stream(other := Stream()):
        sharded, copied = next(walk.buckets).tensors
    assert walk.ties.streams_of(sharded) == [other]
    assert walk.ties.streams_of(copied) == [walk.gathers, other]


@pytest.mark.parametrize("fails_at", [None, 2], ids=["closed", "failed"])
def test_what_is_left_in_flight_is_kept_with_what_is_read_for_it(walk, fails_at):
    walk.fails_at = fails_at
    if fails_at:
        with pytest.raises(RuntimeError, match="the collective failed"):
            next(walk.buckets)
    else:
        done = next(walk.buckets)
        walk.buckets.close()
        assert walk.ties.streams_of(done.tensors[0]) == []
    handed_over = 0 if fails_at else 1
    assert len(walk.launched) == 2
    for gather in walk.launched[handed_over:]:
        assert all(walk.gathers in walk.ties.streams_of(tensor) for tensor in gather.outputs)
    ties = [walk.ties.streams_of(block) for block in walk.source.blocks]
    assert ties == [[walk.gathers] if handed_over <= index // 2 < 2 else [] for index in range(6)]


@pytest.mark.parametrize(
    ("device", "folder", "kept"),
    [
        pytest.param("meta", None, [0, 1], id="module"),
        pytest.param("meta", Path("folder"), [0], id="files"),
        pytest.param("cpu", None, [], id="module-on-host"),
        pytest.param("cpu", Path("folder"), [], id="files-on-host"),
    ],
)
def test_no_bucket_keeps_what_was_read_from_files_beside_its_copy(device, folder, kept):
    source: Any = Memory(torch.device(device), folder)
    bucket = source.buckets()[0]
    (block, copy), made, read = _blocks(bucket.gather(0, device), source)
    assert block is source.blocks[0]
    assert copy is not source.blocks[1]
    assert list(map(id, made)) == [id(copy)]
    assert list(map(id, read)) == [id(source.blocks[index]) for index in kept]
