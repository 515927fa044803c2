"""Loading on real devices. Run by `bin/test-gpu`, under torchrun: every rank runs every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import make, sharded, shared_folder
from loading import assert_holds, snapshot, spoiled
from models import local

from fsdp_export import load_checkpoint, save_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_group")]

folder = pytest.fixture(shared_folder)


def kept_places(model: Any) -> list[tuple[str, int, bool]]:
    shards = map(local, model.state_dict(keep_vars=True).values())
    return [(str(shard.device), shard.data_ptr(), shard.is_pinned()) for shard in shards]


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("kind", ["pinned", "unpinned", "gpu", "some"])
def test_values_go_where_the_shards_are(kind: str, by_columns: bool, folder: Path) -> None:
    model = sharded(kind, by_columns=by_columns)
    expected = snapshot(model)
    save_checkpoint(model, folder / "ours", max_shard_size="2MB", fsync=False)
    before = kept_places(model)
    load_checkpoint(spoiled(model), folder / "ours")
    assert kept_places(model) == before
    assert_holds(model, expected)


@pytest.mark.parametrize("kind", ["pinned", "unpinned", "gpu"])
def test_what_is_on_meta_is_put_where_fsdp_wants_it_and_runs(kind: str, folder: Path) -> None:
    model = sharded(kind, tied=True)
    expected = snapshot(model)
    save_checkpoint(model, folder / "ours", fsync=False)
    empty = sharded(kind, tied=True, on_meta=True)
    load_checkpoint(empty, folder / "ours")
    assert_holds(empty, expected)
    assert [place[0::2] for place in kept_places(empty)] == [place[0::2] for place in kept_places(model)]
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    tokens = torch.arange(8, device="cuda").view(1, -1)
    whole = make(tied=True).cuda()
    assert torch.allclose(empty(tokens).logits, whole(tokens).logits, atol=1e-4)


def test_a_cast_happens_on_the_device_and_streams_are_in_order(folder: Path) -> None:
    model = sharded("gpu")
    expected = {name: value.bfloat16() for name, value in snapshot(model).items()}
    save_checkpoint(model, folder / "ours", fsync=False)
    half = sharded("gpu", on_meta=True).bfloat16()
    load_checkpoint(half, folder / "ours")
    assert_holds(half, expected)
    # What is queued before must not overwrite what is loaded, and what is queued after must see it.
    torch.cuda._sleep(200_000_000)
    spoiled(half)
    load_checkpoint(half, folder / "ours")
    assert_holds(half, expected)
    dist.barrier()
