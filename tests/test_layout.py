"""Our files against those of the safetensors library, byte for byte."""

import random

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from fsdp_export.errors import PlanError
from fsdp_export.layout import lay_out, split_into_files
from fsdp_export.spec import TensorInfo

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz),
    torch.float8_e5m2fnuz,
]
NAMES = ["w", "b.weight", "", "a/b", "ü.weight", 'quote"', "back\\slash", "new\nline", "nul\0", "x" * 300, "日本.語"]


def info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), tensor.dtype)


def written_by_layout(tensors: dict[str, torch.Tensor]) -> bytes:
    layout = lay_out("f", [info(name, tensor) for name, tensor in tensors.items()])
    content = bytearray(layout.num_bytes)
    content[: len(layout.header)] = layout.header
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        content[layout.offsets[name] : layout.offsets[name] + len(data)] = data
    return bytes(content)


@pytest.mark.parametrize("seed", range(25))
def test_file_equals_safetensors(tmp_path, seed):
    chance = random.Random(seed)
    tensors = {}
    for name in chance.sample(NAMES, chance.randint(1, len(NAMES))):
        shape = [chance.choice([0, 1, 2, 3, 7]) for _ in range(chance.randint(0, 3))]
        dtype = chance.choice(DTYPES)
        count = torch.empty(shape, dtype=torch.uint8).numel() * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        tensors[name] = data.view(dtype).reshape(shape)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert written_by_layout(tensors) == (tmp_path / "theirs").read_bytes()


def test_fp4_counts_its_halves(tmp_path):
    packed = torch.randint(0, 256, (2, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"w": packed}, tmp_path / "theirs", metadata={"format": "pt"})
    assert written_by_layout({"w": packed}) == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("limit", [100, "2KB", "1GB"])
@pytest.mark.parametrize("seed", range(5))
def test_split_equals_hub(limit, seed):
    chance = random.Random(seed)
    tensors = {f"t{i}": torch.zeros(chance.randint(1, 400)) for i in range(chance.randint(1, 12))}
    theirs = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    ours = split_into_files([info(name, tensor) for name, tensor in tensors.items()], limit)
    assert {file.name: set(file.offsets) for file in ours} == {
        name: set(keys) for name, keys in theirs.filename_to_tensors.items()
    }


def test_unknown_dtype_is_refused():
    with pytest.raises(PlanError, match=r"cannot store for 'c'.*complex128.*exclude"):
        lay_out("f", [TensorInfo("c", (2,), torch.complex128)])
