"""vLLM's own models and its own loader read what was exported, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dcp_folders import save
from models import shard
from peers.vllm_models import TURNED, assert_arrived, from_base, load, make_base, new, prepare
from ranks import run_ranks
from torch import nn
from transformers.utils import logging

from fsdp_export import Exporter, export_checkpoint

KINDS = ["qwen3", "qwen3-moe", "llama", "llama-tied", "qwen2", "mistral", "mixtral", "gemma2", "deepseek-v3", "gpt-oss"]
KINDS += ["qwen3-next", "qwen2.5-vl", "gemma3"]
IN_BF16 = ["qwen3", "qwen3-moe", "llama-tied"]


def save_all(folder: Path) -> None:
    """Export every model from two ranks, and save it by DCP."""
    for kind in [*KINDS, TURNED]:
        model = shard(new(kind, folder), "1d", 2)
        Exporter(model).save(folder / kind / "live", max_shard_size="20KB", fsync=False)
        save(folder / kind / "step-1", {"model": model.state_dict(), "step": 1})
        if kind in IN_BF16:
            Exporter(model, dtype=torch.bfloat16).save(folder / kind / "bfloat16", fsync=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("saved")
    for kind in [*KINDS, TURNED]:
        make_base(kind, folder)
        new(kind, folder)  # what transformers imports for it, here once for all ranks
    run_ranks(save_all, 2, folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    prepare(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_exported_arrives(kind, saved):
    assert (saved / kind / "live" / "model.safetensors.index.json").exists()
    assert_arrived(kind, load(saved / kind / "live").named_parameters(), new(kind, saved).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_exported_from_a_dcp_folder_arrives(kind, saved, tmp_path):
    export_checkpoint(saved / kind / "step-1", tmp_path / "out", base_model=saved / kind / "base", fsync=False)
    assert_arrived(kind, load(tmp_path / "out").named_parameters(), new(kind, saved).state_dict())


@pytest.mark.parametrize("kind", IN_BF16)
def test_what_was_cast_arrives_in_the_dtype_of_the_config(kind, saved):
    expected = new(kind, saved).to(torch.bfloat16).state_dict()
    assert_arrived(kind, load(saved / kind / "bfloat16", "auto").named_parameters(), expected)


def test_tied_embeddings_are_tied_until_they_differ(saved, tmp_path):
    model = new("llama-tied", saved)
    loaded = load(saved / "llama-tied" / "live")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    Exporter(model).save(tmp_path / "out", fsync=False)
    assert_arrived("llama", load(tmp_path / "out").named_parameters(), model.state_dict())


def test_experts_that_transformers_does_not_turn_back_are_refused(saved):
    """Transformers 5 transposes them as it loads them from the hub, and does not as it saves them."""
    assert_arrived(TURNED, load(saved / TURNED / "base").named_parameters(), from_base(TURNED, saved).state_dict())
    with pytest.raises(RuntimeError, match="size of tensor a"):
        load(saved / TURNED / "live")
