"""Tiny models, and ways to shard them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tiny(nn.Module):
    """Uneven rows, fewer rows than ranks, buffers of several kinds, a tie."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.two_rows = nn.Parameter(torch.empty(2, 3).normal_())
        self.head = nn.Linear(8, 11, bias=False)
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("table", torch.randn(3, 2))
        self.register_buffer("cache", torch.full((4,), float("nan")), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def tiny(*, tied: bool = True) -> Tiny:
    torch.manual_seed(0)
    return Tiny(tied=tied)


def hf_model(kind: str) -> nn.Module:
    """Return a transformers model with weights from a seed: qwen2, qwen2-tied, llama, llama-tied, gpt2."""
    import transformers

    name, _, tied = kind.partition("-")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=33, n_embd=16, n_layer=2, n_head=2, n_positions=24)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied == "tied"}
    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[name]
    return model_class(config_class(**sizes, **heads))


def meshes_for(world_size: int) -> list[str]:
    return {1: ["1d"], 2: ["1d", "dim1"], 4: ["1d", "hsdp", "tp"]}[world_size]


def shard(model: nn.Module, layout: str, world_size: int, **options: Any) -> nn.Module:
    """Shard a model in place.

    Args:
        model: The model.
        layout: `1d`, `dim1` (Shard(1) where it divides), `hsdp` (replicated twice), `tp` (FSDP over TP over 2), `3d`
            (HSDP over TP over 2), or `permuted` (1-D, on a mesh of descending ranks).
        world_size: Number of ranks.
        **options: For `fully_shard`.
    """
    if layout == "1d":
        return shard_on(model, init_device_mesh("cpu", (world_size,)), **options)
    if layout == "dim1":

        def placement(parameter: nn.Parameter) -> Shard | None:
            fits = parameter.dim() > 1 and parameter.shape[1] % world_size == 0
            return Shard(1) if fits else None

        return shard_on(model, init_device_mesh("cpu", (world_size,)), shard_placement_fn=placement, **options)
    if layout == "permuted":
        return shard_on(model, DeviceMesh("cpu", list(reversed(range(world_size)))), **options)
    if layout == "3d":
        cube = init_device_mesh("cpu", (2, world_size // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        _tensor_parallel(model, cube["tp"])
        return shard_on(model, cube["replicate", "shard"], **options)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    if layout == "hsdp":
        return shard_on(model, mesh, **options)
    _tensor_parallel(model, mesh["tp"])
    return shard_on(model, mesh["dp"], **options)


def shard_on(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard a model in place on all axes of a mesh, of which there may be two."""
    for child in reversed(_blocks(model)):  # what lies in another one first
        fully_shard(child, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def compiled(module: nn.Module) -> Any:
    """Wrap a module as `torch.compile` does; nothing is compiled until it runs."""
    return torch.compile(module, backend="eager")


def local(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def put_local(parameter: Any, value: torch.Tensor) -> None:
    """Replace what this rank holds of a sharded parameter."""
    parameter._local_tensor = value


def offloaded() -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith(("Block", "DecoderLayer"))]


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard parameters over a TP axis in turn by rows, by columns, not at all; ties stay."""
    placements: list[Callable[[], Placement]] = [lambda: Shard(0), lambda: Shard(1), Replicate]
    made: dict[int, nn.Parameter] = {}
    turn = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                placement = placements[turn % 3]() if parameter.dim() > 1 else placements[turn % 2 * 2]()
                turn += 1
                made[id(parameter)] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))
                made[id(made[id(parameter)])] = made[id(parameter)]
            setattr(module, name, made[id(parameter)])
