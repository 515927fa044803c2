"""Ties that a config declares and a module does not have: compared at every export, piece by piece, by all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from faults import Outcome, outcome_of, the_error
from models import hf_model
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter
from fsdp_export.sources.live import LiveSource
from fsdp_export.spec import TensorSpec

IS_4 = not hasattr(transformers, "WeightConverter")


def untied() -> Any:
    """Return a model whose config says that it is tied, and whose head is a parameter of its own, with equal values."""
    model: Any = hf_model("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.mark.parametrize("differs", [False, True])
def test_tensors_are_compared_a_chunk_at_a_time(differs, monkeypatch):
    """On a GPU a comparison makes a copy of what it compares."""
    model, read, num_bytes = untied(), LiveSource.rows, list[int]()
    head = model.lm_head.weight
    if differs:
        with torch.no_grad():
            head[-1, -1] += 1

    def rows(source: LiveSource, spec: TensorSpec, first: int, stop: int) -> torch.Tensor:
        num_bytes.append((stop - first) * spec.row_bytes)
        return read(source, spec, first, stop)

    chunk_bytes = 2 * head[0].nbytes
    monkeypatch.setattr("fsdp_export.ties.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(LiveSource, "rows", rows)
    exporter = Exporter(model)
    next(exporter.tensors())
    num_chunks = -(-len(head) // 2)
    assert max(num_bytes[: 2 * num_chunks]) == chunk_bytes
    assert sum(num_bytes[: 2 * num_chunks]) == 2 * head.nbytes
    assert ("lm_head.weight" in [info.name for info in exporter.plan.outputs]) is differs


def save_with_another_flag_on_one_rank(folder: Path) -> Outcome:
    model = untied()
    if dist.get_rank() == 1:
        model.config.tie_word_embeddings = False
    return outcome_of(lambda: Exporter(fully_shard(model)).save(folder, fsync=False))


def test_ranks_whose_configs_declare_different_ties_are_refused(tmp_path):
    kind, message = the_error(run_ranks(save_with_another_flag_on_one_rank, 2, tmp_path / "out"))
    assert kind == "DisagreementError"
    assert "different tied weights" in message
    assert "rank 0: {'lm_head.weight': 'transformer.wte.weight'}; rank 1: {}" in message


class TwoHeads(transformers.PreTrainedModel):
    """A model with two heads that are both tied to its embedding."""

    config_class = transformers.GPT2Config
    _tied_weights_keys = {"one.weight": "embed.weight", "two.weight": "embed.weight"}  # noqa: RUF012  as transformers

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(7, 4)
        self.one, self.two = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
        self.post_init()


@pytest.mark.skipif(IS_4, reason="transformers 4 ties what `get_output_embeddings` returns")
@pytest.mark.parametrize("differs", [False, True])
def test_heads_that_are_one_parameter_still_are_compared_with_the_embedding(differs, tmp_path):
    """So they are where the embedding was wrapped and the heads lie in the root's group."""
    model = TwoHeads(transformers.GPT2Config(tie_word_embeddings=True))
    model.one.weight = model.two.weight = nn.Parameter(model.embed.weight.detach().clone() + int(differs))
    exporter = Exporter(model)
    assert [name for name, _ in exporter.tensors()] == ["embed.weight", *["two.weight"] * differs]
    kept = "two.weight" if differs else "embed.weight"
    assert dict(exporter.plan.aliases) == {"one.weight": kept, **({} if differs else {"two.weight": kept})}
    exporter.save(tmp_path, fsync=False)
    loaded = TwoHeads.from_pretrained(tmp_path)
    assert torch.equal(loaded.two.weight, model.two.weight)


class KeptInAList(TwoHeads):
    """A model that reaches its head by a list, where torch does not see it, as it ties that."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.heads = [self.one]

    def tie_weights(self, *_: Any, **__: Any) -> None:
        for head in getattr(self, "heads", []):
            head.weight = self.embed.weight


def test_a_class_that_ties_what_it_keeps_in_a_list_does_not_change_the_module():
    model = KeptInAList(transformers.GPT2Config(tie_word_embeddings=True))
    model.one.weight = head = nn.Parameter(torch.randn(7, 4))
    expected = head.detach().clone()
    tensors = dict(Exporter(model).tensors())
    assert model.one.weight is head
    assert torch.equal(tensors["one.weight"], expected)
