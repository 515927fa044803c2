"""Boxes against what DTensor really puts on each rank, on simulated ranks."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_export.errors import SourceError
from fsdp_export.spec import Box, Mesh, Sharding


def chunked(rows: int, *parts: int) -> list[list[int]]:
    """Cut `range(rows)` as torch.chunk does, one level per number of parts."""
    pieces = [list(range(rows))]
    for count in parts:
        cut = []
        for piece in pieces:
            chunks = [c.tolist() for c in torch.tensor(piece, dtype=torch.long).chunk(count)] if piece else []
            cut += chunks + [[]] * (count - len(chunks))
        pieces = cut
    return pieces


def rows_of(box: Box) -> list[int]:
    return list(range(*box.rows))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 8, 13, 27])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_axis_is_chunk(rows, size):
    sharding = Sharding.from_placements(Mesh(tuple(range(size)), (size,)), [Shard(0)], "w")
    assert [rows_of(sharding.box((rows, 3), rank)) for rank in range(size)] == chunked(rows, size)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 8, 27])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (3, 4)])
def test_strided_shard_cuts_its_later_axis_first(rows, dp, tp):
    mesh = Mesh(tuple(range(dp * tp)), (dp, tp))
    sharding = Sharding.from_placements(mesh, [_StridedShard(0, split_factor=tp), Shard(0)], "w")
    expected = chunked(rows, tp, dp)
    for d, t in itertools.product(range(dp), range(tp)):
        assert rows_of(sharding.box((rows,), d * tp + t)) == expected[t * dp + d]


def test_left_to_right_without_stride():
    mesh = Mesh(tuple(range(4)), (2, 2))
    sharding = Sharding.from_placements(mesh, [Shard(0), Shard(0)], "w")
    assert [sharding.box((8,), rank).rows for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_three_axes_of_one_dim():
    mesh = Mesh(tuple(range(8)), (2, 2, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0), _StridedShard(0, split_factor=1)]
    sharding = Sharding.from_placements(mesh, placements, "w")
    assert {axis for _, axis in sharding.cuts} == {0, 1, 2}
    assert sorted(sharding.box((8,), rank).rows for rank in range(8)) == [(i, i + 1) for i in range(8)]


def test_holders_come_from_the_mesh():
    sharding = Sharding.from_placements(Mesh((5, 3, 9, 7), (2, 2)), [Replicate(), Shard(0)], "w")
    assert sharding.holders((5, 2)) == ((Box((0, 0), (3, 2)), (5, 9)), (Box((3, 0), (5, 2)), (3, 7)))


def test_ranks_without_rows_hold_an_empty_box():
    sharding = Sharding.from_placements(Mesh((0, 1, 2, 3), (4,)), [Shard(0)], "w")
    assert [box.rows for box, _ in sharding.holders((2, 3))] == [(0, 1), (1, 2), (2, 2)]
    assert sharding.holders((2, 3))[-1][1] == (2, 3)


def test_scalars_are_one_row():
    box = Sharding.replicated((0, 1)).box((), 1)
    assert box.rows == (0, 1)
    assert box.has_full_rows(())


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Partial(), "a placement that cannot be exported for 'w': expected Shard or Replicate"),
        (_StridedShard(0, split_factor=3), "a strided shard that does not follow its mesh for 'w'"),
    ],
    ids=["partial", "strided"],
)
def test_what_is_not_understood_is_refused_by_name(placement, message):
    with pytest.raises(SourceError, match=message):
        Sharding.from_placements(Mesh((0, 1), (2,)), [placement], "w")
