"""The model that is timed: a Qwen2 with tensors of realistic sizes, sharded before it has memory."""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["config_of", "sharded", "sharded_on_meta"]

_LARGE = 4_000_000_000


def config_of(gigabytes: float, dtype: torch.dtype) -> transformers.Qwen2Config:
    """Return the config of a Qwen2 of about the wanted size: as wide as a 7B or a 1.5B, as deep as need be."""
    num_parameters = gigabytes * 1e9 / dtype.itemsize
    if num_parameters >= _LARGE:
        sizes: dict[str, Any] = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
        heads: dict[str, Any] = {"num_attention_heads": 28, "num_key_value_heads": 4}
    else:
        sizes = {"vocab_size": 64000, "hidden_size": 1536, "intermediate_size": 8960}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    in_layer = 2.3 * hidden * hidden + 3 * hidden * inner
    layers = max(round((num_parameters - 2 * sizes["vocab_size"] * hidden) / in_layer), 1)
    return transformers.Qwen2Config(
        **sizes,
        **heads,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
    )


def sharded(
    config: transformers.Qwen2Config, mesh: DeviceMesh, device: str, policy: OffloadPolicy | None = None
) -> nn.Module:
    """Make the model, in its config's dtype, with random weights in the shards, which lie on `device`."""
    model = sharded_on_meta(config, mesh, policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            cast("DTensor", parameter).to_local().uniform_(-0.02, 0.02)
    return model


def sharded_on_meta(
    config: transformers.Qwen2Config, mesh: DeviceMesh, policy: OffloadPolicy | None = None
) -> nn.Module:
    """Make the model without memory, sharded with FSDP2."""
    policy = policy or OffloadPolicy()
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    cast("nn.Module", model).to(cast("torch.dtype", config.dtype))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return cast("nn.Module", model)
