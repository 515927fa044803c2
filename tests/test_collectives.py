"""Which tensors go through which collective."""

import pytest
import torch

from fsdp_export.collectives import Direct, Packed, Part, stages
from fsdp_export.spec import Mesh

AXIS = (Mesh((0, 1), (2,)), 0)
MIB = 1 << 20


def part(index: int, num_bytes: int, *, dim: int = 0, sizes: tuple[int, int] | None = None) -> Part:
    """Return bytes that two ranks have halves of, in rows of 1 KiB or in columns."""
    rows = num_bytes >> 10
    own = sizes or ((rows // 2,) * 2 if dim == 0 else (512, 512))
    shape = (own[0], 1024) if dim == 0 else (rows, own[0])
    return Part(index, shape, dim, own, torch.uint8)


def sent(parts: list[Part], device_type: str) -> list[tuple[type, list[int]]]:
    return [(type(stage), [each.index for each in stage.parts]) for stage in stages(parts, AXIS, device_type)]


@pytest.mark.parametrize(("device_type", "small_mib"), [("cpu", 2), ("cuda", 32)])
def test_small_tensors_share_a_collective_and_large_ones_stay_where_they_are(device_type, small_mib):
    parts = [part(0, small_mib * MIB), part(1, small_mib * MIB - 2048), part(2, 4096), part(3, 2 * small_mib * MIB)]
    assert sent(parts, device_type) == [(Direct, [0, 3]), (Packed, [1, 2])]


def test_what_a_collective_sends_is_bounded():
    parts = [part(index, 30 * MIB) for index in range(10)]
    assert sent(parts, "cuda") == [(Packed, [0, 1, 2, 3]), (Packed, [4, 5, 6, 7]), (Packed, [8, 9])]


def test_columns_are_packed_and_rows_are_received_where_they_belong():
    rows = 64 << 10
    uneven = [(rows, 0), (50_000, 49_000), (49_000, 50_000)]
    parts = [part(0, 64 * MIB, dim=1), *(part(1 + index, 64 * MIB, sizes=sizes) for index, sizes in enumerate(uneven))]
    assert sent(parts, "cuda") == [(Direct, [1, 2]), (Packed, [0]), (Packed, [3])]


@pytest.mark.parametrize(
    ("sizes", "is_direct"),
    [
        pytest.param((5, 5, 5, 5), True, id="even"),
        pytest.param((5, 5, 5, 3), True, id="short"),
        pytest.param((5, 5, 5, 2), False, id="much memory for nothing"),
        pytest.param((1,) * 60 + (0,) * 4, True, id="none on the last ranks"),
        pytest.param((2,) * 30 + (1, 0, 0), True, id="short, and none on the last ranks"),
        pytest.param((9, 9, 8, 9), False, id="a gap"),
        pytest.param((9, 9, 8, 8), False, id="two short ones"),
    ],
)
def test_rows_are_received_in_place_if_little_lies_behind_them(sizes, is_direct):
    block = Part(0, (sizes[0], 8 * MIB), 0, sizes, torch.uint8)
    (stage,) = stages([block], AXIS, "cuda")
    assert (type(stage) is Direct) == is_direct
    num_bytes = stage.new_output(block, torch.empty(0, device="meta")).untyped_storage().nbytes() // 4
    assert num_bytes == (len(sizes) * sizes[0] if is_direct else sum(sizes)) * 8 * MIB


@pytest.mark.parametrize(("own_rows", "scratch_rows"), [(50_000, 0), (49_000, 50_000)], ids=["full", "short"])
def test_only_a_rank_with_a_shorter_block_copies_it(own_rows, scratch_rows):
    block = Part(0, (own_rows, 1024), 0, (50_000, 49_000), torch.uint8)
    (stage,) = stages([block], AXIS, "cuda")
    assert stage.scratch_bytes == scratch_rows * 1024
    output = stage.new_output(block, torch.empty(0, dtype=torch.uint8))
    assert output.shape == (99_000, 1024)
    assert output.is_contiguous()
    assert output.untyped_storage().nbytes() == 2 * 50_000 * 1024


def test_a_block_of_columns_is_sent_from_where_it_is():
    (stage,) = stages([part(0, 64 * MIB, dim=1)], AXIS, "cuda")
    assert stage.scratch_bytes == 64 * MIB
