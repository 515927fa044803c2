"""Blocks cut by hand as `torch.chunk` cuts, gathered over real groups, against the tensors they were cut from."""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_export import collectives
from fsdp_export.gather import GatherPlan, Groups, Slice
from fsdp_export.spec import Mesh, Sharding, TensorSpec

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int64, torch.uint8),
    *(torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
MESHES: dict[int, list[Any]] = {
    4: [[0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[[0, 1]], [[2, 3]]]],
    6: [[[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]], [0, 1, 2, 3, 4, 5]],
}


def cut_order(chance: random.Random, mesh_shape: list[int]) -> list[int]:
    axes = list(range(len(mesh_shape)))
    return chance.sample(axes, chance.randint(0, len(axes)))


def placements_for(order: list[int], dims: list[int], mesh_shape: list[int]) -> list[Placement]:
    """State in DTensor's words that mesh axis `order[i]` cuts dim `dims[i]`, one after the other."""
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    for position, (axis, dim) in enumerate(zip(order, dims, strict=True)):
        earlier = [a for a, d in zip(order[:position], dims[:position], strict=True) if d == dim and a > axis]
        factor = math.prod(mesh_shape[a] for a in earlier)
        placements[axis] = _StridedShard(dim, split_factor=factor) if earlier else Shard(dim)
    return placements


def held_indices(size: int, cuts: list[tuple[int, int]]) -> list[int]:
    """Return the indices of a dim that are left after cuts (parts, which part)."""
    indices = torch.arange(size)
    for parts, part in cuts:
        chunks = indices.chunk(parts) if len(indices) else ()
        indices = chunks[part] if part < len(chunks) else indices[:0]
    return indices.tolist()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor with its bytes as one more dim."""
    return tensor.contiguous().reshape(*tensor.shape, 1).view(torch.uint8)


def random_tensor(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shape = [chance.choice([0, 1, 2, 3, 4, 5, 7, 8, 13, 27]) for _ in range(chance.choice([0, 1, 1, 2, 2, 2, 3]))]
    high = 2 if dtype == torch.bool else 256
    data = [chance.randrange(high) for _ in range(math.prod(shape) * dtype.itemsize)]
    return torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(shape)


def random_rows(chance: random.Random, num_rows: int) -> tuple[tuple[int, int], ...]:
    bounds = sorted(chance.sample(range(num_rows + 1), 2 * chance.randint(0, (num_rows + 1) // 2)))
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def random_block(
    chance: random.Random, name: str, mesh: Mesh, rank: int
) -> tuple[Slice, torch.Tensor, torch.Tensor, object]:
    """Return some rows of a random tensor, this rank's block of them, they themselves, and what it is, for messages."""
    full = random_tensor(chance, chance.choice(DTYPES))
    order = cut_order(chance, list(mesh.shape)) if full.dim() else []
    dims = [chance.randrange(full.dim()) for _ in order]
    placements = placements_for(order, dims, list(mesh.shape))
    spec = TensorSpec(name, tuple(full.shape), full.dtype, Sharding.from_placements(mesh, placements, name))
    windows = random_rows(chance, len(full)) if full.dim() and chance.random() < 0.6 else ((0, spec.num_rows),)
    wanted = [row for first, stop in windows for row in range(first, stop)]
    expected = as_bytes(full)[wanted] if full.dim() else as_bytes(full)
    local = expected
    for dim in range(full.dim()):
        cuts = [
            (mesh.shape[axis], mesh.coordinate(rank)[axis]) for axis, d in zip(order, dims, strict=True) if d == dim
        ]
        held = held_indices(full.shape[dim], cuts)
        kept = [position for position, row in enumerate(wanted) if row in held] if dim == 0 else held
        local = local.index_select(dim, torch.tensor(kept, dtype=torch.int64))
    tensor = local.contiguous().view(full.dtype).reshape(local.shape[:-1])
    return Slice(spec, windows, full.dtype), tensor, expected, (spec, placements, windows)


def groups_of(device_mesh: DeviceMesh, mesh: Mesh) -> Groups:
    return {(mesh, axis): device_mesh.get_group(axis) for axis, size in enumerate(mesh.shape) if size > 1}


def gather_random_buckets(seeds: range) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for layout in MESHES[world_size]:
        device_mesh = DeviceMesh("cpu", layout)
        mesh = Mesh(tuple(device_mesh.mesh.flatten().tolist()), tuple(device_mesh.mesh.shape))
        for seed in seeds:
            chance = random.Random(seed)
            made = [random_block(chance, f"t{index}", mesh, rank) for index in range(chance.randint(1, 6))]
            plan, groups = GatherPlan([each for each, *_ in made], rank, "cpu"), groups_of(device_mesh, mesh)
            for _ in range(2):
                bucket = plan.begin([block for _, block, *_ in made], groups)
                bucket.launch()
            for output, (each, _, expected, facts) in zip(bucket.outputs, made, strict=True):
                assert output.is_contiguous()
                assert output.dtype == each.spec.dtype
                assert torch.equal(as_bytes(output), expected), (layout, seed, facts)


@pytest.mark.parametrize("world_size", [4, 6])
@pytest.mark.parametrize("small_bytes", [0, 48, 4 << 20], ids=["each-alone", "mixed", "one-bucket"])
def test_random_buckets(world_size, small_bytes, monkeypatch):
    monkeypatch.setattr(collectives, "_SMALL_BYTES_ON_CPU", small_bytes)
    monkeypatch.setattr(collectives, "_BATCH_BYTES", small_bytes)
    run_ranks(gather_random_buckets, world_size, range(12))


def test_what_dtensor_distributes_comes_back_as_its_full_tensor():
    def check() -> None:
        device_mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        mesh = Mesh((0, 1, 2, 3), (2, 2))
        chance = random.Random(0)
        for placements in (
            [Shard(0), Shard(0)],
            [Shard(1), Shard(0)],
            [Replicate(), Shard(1)],
            [Shard(2), Replicate()],
        ):
            for _ in range(8):
                shape = [chance.choice([1, 2, 3, 5, 8]) for _ in range(3)]
                dtensor = distribute_tensor(torch.arange(math.prod(shape)).reshape(shape), device_mesh, placements)
                sharding = Sharding.from_placements(mesh, dtensor.placements, "w")
                spec = TensorSpec("w", tuple(shape), torch.int64, sharding)
                local = dtensor.to_local().contiguous()
                plan = GatherPlan([Slice(spec, ((0, shape[0]),), torch.int64)], dist.get_rank(), "cpu")
                bucket = plan.begin([local], groups_of(device_mesh, mesh))
                bucket.launch()
                assert torch.equal(bucket.outputs[0], dtensor.full_tensor()), (placements, shape)

    run_ranks(check, 4)


@pytest.mark.parametrize("num_rows", [11, 10], ids=["received-in-place", "packed"])
def test_behind_an_output_lies_nothing_of_the_memory_of_a_rank(num_rows, monkeypatch):
    """`torch.save` writes it. Memory that torch did not fill itself is full of 255 here."""
    monkeypatch.setattr(collectives, "_SMALL_BYTES_ON_CPU", 0)

    def check() -> None:
        torch.use_deterministic_algorithms(True)
        device_mesh, mesh = DeviceMesh("cpu", [0, 1, 2]), Mesh((0, 1, 2), (3,))
        full = torch.arange(1, 3 * num_rows + 1, dtype=torch.int64).reshape(num_rows, 3)
        spec = TensorSpec("w", (num_rows, 3), torch.int64, Sharding(mesh, ((0, 0),)))
        plan = GatherPlan([Slice(spec, ((0, num_rows),), torch.int64)], dist.get_rank(), "cpu")
        block = full[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
        bucket = plan.begin([block], groups_of(device_mesh, mesh))
        bucket.launch()
        assert torch.equal(bucket.outputs[0], full)
        whole = torch.empty(0, dtype=torch.int64).set_(bucket.outputs[0].untyped_storage())
        assert whole.tolist() == full.flatten().tolist() + [0] * (3 if num_rows == 11 else 0)

    run_ranks(check, 3)


def test_replicas_send_nothing():
    local = torch.ones(3, 2)
    spec = TensorSpec("w", (3, 2), torch.float32, Sharding(Mesh((0, 1), (2,))))
    bucket = GatherPlan([Slice(spec, ((0, 3),), torch.float32)], 0, "cpu").begin([local], {})
    bucket.launch()
    assert bucket.outputs[0] is local
