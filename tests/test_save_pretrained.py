"""Files against those of `save_pretrained` of the unsharded model, byte for byte."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from dcp_folders import save
from models import hf_model, shard
from ranks import run_ranks
from transformers.utils import logging

from fsdp_export import Exporter, export_checkpoint

KINDS = ["qwen2", "qwen2-tied", "llama", "llama-tied", "gpt2"]
SIZES: list[int | str] = ["2KB", "5GB"]
WORLDS = [(1, "1d"), (2, "1d"), (2, "dim1"), (2, "permuted"), (4, "1d"), (4, "dim1"), (4, "hsdp"), (4, "tp"), (4, "3d")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> "References":
    return References(tmp_path_factory.mktemp("references"))


class References:
    """What `save_pretrained` makes of the unsharded models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, kind: str, size: int | str, dtype: torch.dtype | None = None) -> None:
        """Save a model unless it is there already. Before ranks are forked."""
        folder = self._path(kind, size, dtype)
        if not folder.exists():
            logging.disable_progress_bar()
            model: Any = hf_model(kind)
            model.to(dtype or torch.float32).save_pretrained(folder, max_shard_size=size)

    def differing_files(self, ours: Path, kind: str, size: int | str, dtype: torch.dtype | None = None) -> list[str]:
        """Return the names of weight files and indexes that are not the same, or not in both folders."""
        folders = (ours, self._path(kind, size, dtype))
        contents = [{path.name: path.read_bytes() for path in folder.glob("model*")} for folder in folders]
        assert contents[1]
        return sorted(
            name for name in contents[0].keys() | contents[1].keys() if contents[0].get(name) != contents[1].get(name)
        )

    def _path(self, kind: str, size: int | str, dtype: torch.dtype | None) -> Path:
        return self._folder / f"{kind}-{size}-{dtype}"


@pytest.mark.parametrize(("world_size", "layout"), WORLDS)
def test_files_are_those_of_save_pretrained(world_size, layout, references, tmp_path):
    for kind, size in itertools.product(KINDS, SIZES):
        references.add(kind, size)

    def check() -> list[tuple[object, ...]]:
        wrong: list[tuple[object, ...]] = []
        for kind in KINDS:
            exporter = Exporter(shard(hf_model(kind), layout, world_size))
            for size, gather_all in itertools.product(SIZES, (False, True)):
                folder = tmp_path / f"{kind}-{size}-{gather_all}"
                exporter.save(folder, max_shard_size=size, gather_all=gather_all, fsync=False)
                wrong += [(folder.name, name) for name in references.differing_files(folder, kind, size)]
                assert (folder / "config.json").is_file()
        return wrong

    assert run_ranks(check, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_no_bucket_limit_or_layout_changes_the_bytes(world_size, references, tmp_path):
    limits = [100, 3000, "10KB", "1MB"]
    for limit in limits:
        references.add("qwen2-tied", limit)

    def check() -> None:
        chance = random.Random(world_size)
        layouts = [layout for size, layout in WORLDS if size == world_size] or ["1d", "dim1"]
        for layout in layouts:
            model = shard(hf_model("qwen2-tied"), layout, world_size)
            for bucket_bytes in (1, 100, 10_000, None) if layout in {"1d", "tp"} else (300, None):
                limit, gather_all = chance.choice(limits), chance.random() < 0.5
                exporter = Exporter(model, bucket_bytes=bucket_bytes)
                exporter.save(tmp_path, max_shard_size=limit, gather_all=gather_all, fsync=False)
                case = (layout, bucket_bytes, limit, gather_all)
                assert references.differing_files(tmp_path, "qwen2-tied", limit) == [], case
                dist.barrier()

    run_ranks(check, world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_files_are_those_of_the_cast_model(dtype, references, tmp_path):
    for kind, size in itertools.product(["qwen2-tied", "gpt2"], SIZES):
        references.add(kind, size, dtype)

    def check() -> None:
        for kind, size, layout in itertools.product(["qwen2-tied", "gpt2"], SIZES, ["1d", "dim1"]):
            exporter = Exporter(shard(hf_model(kind), layout, 2), dtype=dtype)
            for gather_all in (False, True):
                exporter.save(tmp_path, max_shard_size=size, gather_all=gather_all, fsync=False)
                assert references.differing_files(tmp_path, kind, size, dtype) == [], (kind, size, layout, gather_all)
                dist.barrier()

    run_ranks(check, 2)


def test_tables_that_a_class_computes_anew_are_left_out(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 8}
    config = transformers.MarianConfig(vocab_size=33, pad_token_id=0, decoder_start_token_id=0, **sizes, **heads)
    model = transformers.MarianMTModel(config)
    logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "theirs")
    Exporter(model).save(tmp_path / "ours")
    export_checkpoint(save(tmp_path / "step-1", model.state_dict()), tmp_path / "disk", base_model=tmp_path / "theirs")
    live, disk, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "disk", "theirs"))
    assert live == theirs
    assert disk == theirs
    assert "model.encoder.embed_positions.weight" in model.state_dict()
