"""Adapters as trainers write them, and state dicts for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

NUM_HEADS, NUM_EXPERTS = 2, 4


class Block(nn.Module):
    """A layer in a trainer's own names: rotary pairs side by side, fused gate and up, fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(8, 8, bias=False)
        self.gate_up = nn.Linear(8, 12, bias=False)
        self.qk = nn.ParameterList([nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(2, 8))])
        self.w1 = nn.Parameter(torch.randn(NUM_EXPERTS, 6, 8))
        self.w2 = nn.Parameter(torch.randn(NUM_EXPERTS, 8, 6))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("steps", torch.tensor(7))


class Model(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.output = nn.Linear(8, 11, bias=False)


class Adapter:
    """Renames, permutes, splits, joins, transposes and leaves out."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def to_hf(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls.append(len(state_dict))
        result: dict[str, torch.Tensor] = {}
        for name, tensor in state_dict.items():
            result |= self.convert(name, tensor)
        for layer in {match[1] for name in state_dict if (match := re.match(r"layers\.(\d+)\.qk\.", name))}:
            q, k = (state_dict[f"layers.{layer}.qk.{index}"] for index in range(2))
            result[f"model.layers.{layer}.qk.weight"] = torch.cat([q, k])
        return result

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        match = re.match(r"layers\.(\d+)\.(.*)", name)
        if match is None:
            new_name = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}[name]
            return {new_name: tensor}
        kind, _, rest = match[2].partition(".")
        converted: dict[str, torch.Tensor] = {}
        if kind == "wq":
            pairs = tensor.view(NUM_HEADS, 8 // NUM_HEADS // 2, 2, 8)
            converted = {"q_proj.weight": pairs.transpose(1, 2).reshape(8, 8).clone()}
        elif kind == "gate_up":
            converted = dict(zip(("gate_proj.weight", "up_proj.weight"), tensor.chunk(2), strict=True))
        elif kind == "w1":
            converted = {f"experts.{index}.w1.weight": part.squeeze() for index, part in enumerate(tensor.split(1))}
        elif kind == "w2":
            converted = {f"experts.{index}.w2.weight": tensor[index].t() for index in range(NUM_EXPERTS)}
        elif kind == "norm":
            converted = {f"input_layernorm.{rest}": tensor}
        return {f"model.layers.{match[1]}.{new_name}": output for new_name, output in converted.items()}


class OneByOne:
    """The same without what is joined, tensor by tensor."""

    def convert_single_tensor_to_hf(self, fqn: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [] if ".qk." in fqn else list(Adapter().convert(fqn, tensor).items())
