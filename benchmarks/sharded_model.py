"""The models that are timed, of realistic sizes, sharded before they have memory; and the ranks that hold them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from measuring import machine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["SIZES", "config_of", "facts_of", "process_group", "sharded", "sharded_on_meta"]

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
    return _dense(num_hidden_layers=layers, dtype=dtype, **sizes, **heads)


def _dense(**sizes: Any) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(
        **{"tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"], "dtype": torch.bfloat16, **sizes}
    )


def _moe(**sizes: Any) -> transformers.Qwen3MoeConfig:
    return transformers.Qwen3MoeConfig(
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        dtype=torch.bfloat16,
        **sizes,
    )


_SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 128, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4}
_FEW = {"num_experts": 32, "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}

SIZES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "dense-7b": partial(config_of, 15.2, torch.bfloat16),
    "dense-0.5b": partial(_dense, vocab_size=151936, num_hidden_layers=24, **_SMALL),
    "moe": partial(_moe, vocab_size=151936, hidden_size=2048, num_hidden_layers=8, **_EXPERTS),
    "dense-tiny": partial(_dense, vocab_size=8000, num_hidden_layers=8, **_SMALL),
    "moe-tiny": partial(_moe, vocab_size=8000, hidden_size=512, num_hidden_layers=4, **_FEW),
}
"""Configs by name: a 7B, a 0.5B, eight layers of a 30B with 128 experts, and two for the CPU."""


def facts_of(device: str) -> dict[str, Any]:
    """Return what every benchmark on ranks tells of these: how many, on what, with which versions."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device == "cuda" else machine(),
    }


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the ranks that torchrun started, each with one thread, and on GPUs with one of these."""
    torch.set_num_threads(1)
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        # FSDP2 keeps gloo's threads alive. One that lets go of its last tensor needs Python, at whose end it aborts.
        time.sleep(0.2)
        dist.destroy_process_group()


def sharded(
    config: transformers.PreTrainedConfig, mesh: DeviceMesh, device: str, policy: OffloadPolicy | None = None
) -> nn.Module:
    """Make the model, in its config's dtype, with random weights in the shards, which lie on `device`."""
    model = sharded_on_meta(config, mesh, policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            cast("DTensor", parameter).to_local().uniform_(-0.02, 0.02)
    return model


def sharded_on_meta(
    config: transformers.PreTrainedConfig, mesh: DeviceMesh, policy: OffloadPolicy | None = None
) -> nn.Module:
    """Make the model without memory, sharded with FSDP2."""
    policy = policy or OffloadPolicy()
    kind = getattr(transformers, (config.architectures or [""])[0])
    with torch.device("meta"):
        model = kind(config)
    cast("nn.Module", model).to(cast("torch.dtype", config.dtype))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return cast("nn.Module", model)
