"""LoRA merged into a live model tensor by tensor, against PEFT's own merge of a copy."""

from __future__ import annotations

import pytest
import torch
from peft_models import MODELS, merged, with_lora

from fsdp_export import Exporter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_merged_equals_what_peft_merges(kind, dtype):
    model = with_lora(kind, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = dict(Exporter(model).tensors())
    expected = merged(model).state_dict()
    if kind.startswith("gpt2"):  # tied, so that PEFT's merge changes the head as well, or it is left out
        expected["lm_head.weight"] = before["base_model.model.lm_head.weight"]
        tensors.setdefault("lm_head.weight", expected["lm_head.weight"])
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
