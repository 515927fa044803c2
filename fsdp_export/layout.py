"""The bytes of a safetensors file, known before any of its tensors is.

Format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors. The order, the padding and
the spelling of the JSON are those of the safetensors library, so that our files equal its files byte for byte
(https://github.com/huggingface/safetensors, `safetensors/src/tensor.rs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import PlanError
from .spec import TensorInfo

__all__ = ["DEFAULT_SHARD_SIZE", "FileLayout", "lay_out", "split_into_files"]

DEFAULT_SHARD_SIZE = "5GB"

# Highest first: the order in which a file lists its tensors. Names that an older torch lacks are left out.
_DTYPE_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
_CODES: dict[torch.dtype, tuple[int, str]] = {
    getattr(torch, name): (rank, code) for rank, (name, code) in enumerate(_DTYPE_CODES.items()) if hasattr(torch, name)
}
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One safetensors file.

    Attributes:
        name: Its name in the folder.
        header: Its first bytes: length, JSON, padding.
        offsets: Where each tensor begins, in bytes from the start of the file.
        num_bytes: Its size.
    """

    name: str
    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int


def lay_out(name: str, tensors: Sequence[TensorInfo]) -> FileLayout:
    """Lay out the tensors of one file.

    Raises:
        PlanError: safetensors has no code for a dtype, or the header is larger than readers accept.
    """
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            raise PlanError(
                "a dtype that safetensors cannot store",
                name=tensor.name,
                found=tensor.dtype,
                fix="Cast it, or leave it out with exclude=",
            )
    ordered = sorted(tensors, key=lambda tensor: (_CODES[tensor.dtype][0], tensor.name.encode()))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor in ordered:
        begins[tensor.name] = end
        end += tensor.num_bytes
        code = _CODES[tensor.dtype][1]
        shape = [*tensor.shape[:-1], 2 * tensor.shape[-1]] if code == "F4" else list(tensor.shape)
        entries[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": [begins[tensor.name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise PlanError(
            "a header too large for safetensors",
            file=name,
            expected=f"at most {_MAX_HEADER_BYTES:,} bytes",
            found=f"{len(text):,} bytes for {len(tensors):,} tensors",
            fix="Use a smaller max_shard_size",
        )
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor_name: len(header) + begin for tensor_name, begin in begins.items()}
    return FileLayout(name, header, offsets, len(header) + end)


def split_into_files(
    tensors: Sequence[TensorInfo],
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    blocks: Mapping[str, int] | None = None,
) -> list[FileLayout]:
    """Split tensors into files as `save_pretrained` does.

    Args:
        tensors: All tensors, in the order of the state dict.
        max_shard_size: Bytes per file, a number or decimal like `"5GB"`. A larger tensor gets a file of its own.
        blocks: Names of tensors that stay together as if they were one, and a number that those share.

    Returns:
        `model.safetensors`, or `model-0000i-of-0000N.safetensors` in order.

    Raises:
        PlanError: As `lay_out`.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in tensors}
    block_of = blocks or {}
    block_bytes: dict[int | str, int] = {}
    for tensor in tensors:
        block = block_of.get(tensor.name, tensor.name)
        block_bytes[block] = block_bytes.get(block, 0) + tensor.num_bytes
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: block_bytes[block_of.get(tensor.name, tensor.name)],
        get_storage_id=lambda tensor: block_of.get(tensor.name),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return [lay_out(name, [by_name[key] for key in keys]) for name, keys in split.filename_to_tensors.items()]
