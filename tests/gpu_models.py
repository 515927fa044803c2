"""What the tests on devices share: a folder of all ranks, models sharded on a device mesh, and what comes of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_export import Exporter, save_checkpoint

OFFLOAD: dict[str, OffloadPolicy] = {
    "pinned": CPUOffloadPolicy(pin_memory=True),
    "unpinned": CPUOffloadPolicy(pin_memory=False),
    "gpu": OffloadPolicy(),
}


def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that all ranks share."""
    names = [str(tmp_path_factory.mktemp("shared"))]
    dist.broadcast_object_list(names, device=torch.device("cuda"))
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0], ignore_errors=True)


def make(*, tied: bool = False, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=1031,
        hidden_size=256,
        intermediate_size=515,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.Qwen2ForCausalLM(config)


def sharded(
    kind: str, *, tied: bool = False, hsdp: bool = False, by_columns: bool = False, on_meta: bool = False
) -> Any:
    with torch.device("meta" if on_meta else "cpu"):
        model = make(tied=tied)
    size = dist.get_world_size()
    shape, names = ((size, 1), ("replicate", "shard")) if hsdp else ((size,), ("shard",))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh}
    if by_columns:
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % size == 0 else None
    if kind == "gpu" and not on_meta:
        model.cuda()
    for index, layer in enumerate(model.model.layers):
        policy = OFFLOAD["gpu" if kind == "some" and index else "pinned" if kind == "some" else kind]
        fully_shard(layer, offload_policy=policy, **options)
    return fully_shard(model, offload_policy=OFFLOAD["pinned" if kind == "some" else kind], **options)


def large_layers(kind: str) -> nn.Sequential:
    """Return 4.3 GB of layers, for what is timed: `"gpu"`, or `"pinned"` in host memory."""
    model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(32)))
    if kind == "pinned":
        model.cpu()
    for layer in model:
        fully_shard(layer, offload_policy=OFFLOAD[kind])
    fully_shard(model, offload_policy=OFFLOAD[kind])
    return model


def check_tensors(model: Any, expected: Any, **options: Any) -> None:
    wanted = {name: value for name, value in expected.state_dict().items() if name != "lm_head.weight"}
    if not expected.config.tie_word_embeddings:
        wanted["lm_head.weight"] = expected.lm_head.weight
    delivered = dict(Exporter(model, **options).tensors())
    assert delivered.keys() == wanted.keys()
    for name, tensor in delivered.items():
        assert tensor.device == torch.device("cuda", torch.cuda.current_device())
        assert torch.equal(tensor.cpu(), wanted[name]), name


def check_folder(model: Any, expected: Any, folder: Path, **options: Any) -> None:
    save_checkpoint(model, folder / "ours", max_shard_size="2MB", **options)
    check_written(folder / "ours", expected)


def check_written(folder: Path, expected: Any) -> None:
    if dist.get_rank() == 0:
        theirs = folder.with_name("theirs")
        shutil.rmtree(theirs, ignore_errors=True)
        expected.save_pretrained(theirs, max_shard_size="2MB")
        names = sorted(path.name for path in theirs.glob("model*"))
        assert names == sorted(path.name for path in folder.glob("model*"))
        for name in names:
            assert (folder / name).read_bytes() == (theirs / name).read_bytes(), name
    dist.barrier()
