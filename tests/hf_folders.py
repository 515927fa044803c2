"""Folders of safetensors: written by the library, or put together byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"

Tensors = Mapping[str, torch.Tensor]


def write(folder: Path, files: Mapping[str, Tensors], *, index: Mapping[str, str] | bool = False) -> Path:
    """Write files with the library.

    Args:
        folder: Where to; made if it is not there.
        files: The tensors of each file.
        index: Whether to write an index, or what it says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)
    if index:
        truth = {key: name for name, tensors in files.items() for key in tensors}
        write_index(folder, truth if index is True else index)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


def write_shard(file: Path, blocks: Mapping[str, tuple[torch.Tensor, list[int]]]) -> None:
    """Write what torch's writer leaves of a rank: blocks of tensors, and where they begin."""
    file.parent.mkdir(parents=True, exist_ok=True)
    info = {key: {"saved_offsets": start} for key, (_, start) in blocks.items()}
    tensors = {key: block.contiguous().clone() for key, (block, _) in blocks.items()}
    save_file(tensors, file, metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"})


def write_raw(file: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    """Write a file with any header: JSON, or the bytes in its place."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
