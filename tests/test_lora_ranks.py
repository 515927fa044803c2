"""A PEFT model on several ranks gives what PEFT makes of the unsharded one, whatever the mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import outcome_of, the_error
from models import shard
from peft_models import merged_tensors, quiet, with_lora
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter, save_checkpoint

KINDS = ["dora", "saved", "experts", "gpt2-dora", "lora-bias"]
LAYOUTS = [(2, "root"), (2, "dim1"), (3, "1d"), (4, "hsdp"), (4, "tp")]


def on_ranks(kind, layout):
    model = with_lora(kind)
    return fully_shard(model) if layout == "root" else shard(model, layout, dist.get_world_size())


def export_in_all_ways(folder, layout):
    """Export every kind to a loop, and to files with and without gathers."""
    is_lead = dist.get_rank() == 0
    for kind in KINDS:
        model = on_ranks(kind, layout)
        tensors = dict(Exporter(model, bucket_bytes=3000).tensors())
        save_checkpoint(model, folder / kind / "held", lora="merge", format="safetensors")
        exporter = Exporter(model, bucket_bytes=3000)
        exporter.save(folder / kind / "gathered", format="safetensors", gather_all=True)
        save_checkpoint(model, folder / kind / "adapter", fsync=False)
        if is_lead:
            torch.save(tensors, folder / kind / "tensors.pt")


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_shards_are_merged_as_the_whole_model(world_size, layout, tmp_path: Path):
    run_ranks(export_in_all_ways, world_size, tmp_path, layout)
    for kind in KINDS:
        model, folder = with_lora(kind), tmp_path / kind
        expected = merged_tensors(model)
        expected.pop("lm_head.weight") if kind == "gpt2-dora" else None
        held, gathered = (load_file(folder / name / "model.safetensors") for name in ("held", "gathered"))
        for found in (held, gathered, torch.load(folder / "tensors.pt")):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), kind
        with quiet():
            model.save_pretrained(folder / "peft")
        ours, theirs = folder / "adapter", folder / "peft"
        weights = "adapter_model.safetensors"
        assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
        assert adapter_config(ours) == adapter_config(theirs)


def adapter_config(folder):
    """Read a config, in which PEFT lists a set in any order."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


def save_where_one_rank_lacks_a_value(folder, lora):
    model = fully_shard(with_lora("plain"))
    values = dict(model.state_dict())
    if dist.get_rank() == 1:
        values.popitem()
    return outcome_of(lambda: Exporter(model, state_dict=values, lora=lora).save(folder, fsync=False))


@pytest.mark.parametrize("lora", ["merge", "adapter"])
def test_what_one_rank_cannot_merge_or_reduce_is_the_error_of_all(lora, tmp_path):
    kind, message = the_error(run_ranks(save_where_one_rank_lacks_a_value, 2, tmp_path / "out", lora))
    assert (kind, "rank 1" in message) == ("UsageError", True)
