"""Inputs that are small and ask for much: memory, time, a pipe's other end."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dcp_folders import edit_metadata, put_together, save
from hf_folders import INDEX, write, write_raw
from rank_folders import cut, edit_archive, edit_pickle, put_ranks, rank_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh

__all__ = ["BOMBS"]

Maker = Callable[[Path], None]

BOMBS: list[tuple[Maker, bool]] = []
"""Makers, which fill a folder, and whether reading it must raise one of our errors rather than give its tensors."""

FULL = torch.arange(40.0).view(8, 5)
_MANY = 30_000


def _bomb(*, is_refused: bool) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        BOMBS.append((maker, is_refused))
        return maker

    return register


class _Sizes:
    """Pickled, it asks its reader for a copy of numbers that stand in the pickle once."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, (self.numbers,)


def _endless(depth: int = 60) -> bytes:
    """Return the pickle of a tuple of two, both of which are a tuple of the same two, and so on."""
    keys = [struct.pack("<I", 9000 + index) for index in range(depth)]
    return b")" + b"".join(b"r" + key + b"j" + key + b"\x86" for key in keys)


def _halves(_rank: int) -> dict[str, Any]:
    return {"w": cut(FULL, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), [(0, 0)])}


@_bomb(is_refused=False)
def axis_with_an_endless_name(folder: Path) -> None:
    put_ranks(folder, _halves, 2)
    for rank in range(2):
        edit_pickle(folder / rank_file(rank, 2), (b"X\x04\x00\x00\x00fsdp", _endless()))


@_bomb(is_refused=True)
def shard_of_an_endless_dim(folder: Path) -> None:
    put_ranks(folder, _halves, 2)
    edit_pickle(
        folder / rank_file(0, 2), (b"X\x03\x00\x00\x00dimq", b"X\x03\x00\x00\x00dim" + _endless() + b"X\1\0\0\0dq")
    )


@_bomb(is_refused=True)
def endless_key(folder: Path) -> None:
    put_ranks(folder, _halves, 2)
    edit_pickle(folder / rank_file(0, 2), (b"X\x01\x00\x00\x00w", _endless()))


@_bomb(is_refused=True)
def copies_of_many_numbers(folder: Path) -> None:
    numbers = list(range(_MANY))
    folder.mkdir()
    torch.save({"w": FULL, "sizes": [_Sizes(numbers) for _ in range(_MANY)]}, folder / "model.pt")


@_bomb(is_refused=True)
def lists_of_lists_of_one_list(folder: Path) -> None:
    numbers = [list(range(_MANY))] * _MANY
    folder.mkdir()
    torch.save({"w": FULL, "numbers": numbers}, folder / "model.pt")


@_bomb(is_refused=True)
def dicts_of_dicts_without_end(folder: Path) -> None:
    content: dict[str, Any] = {"w": FULL}
    for _ in range(7):
        content = {str(index): content for index in range(50)}
    folder.mkdir()
    torch.save(content, folder / "model.pt")


@_bomb(is_refused=True)
def long_key_of_many_entries(folder: Path) -> None:
    folder.mkdir()
    torch.save({"x" * 100_000: {str(index): FULL for index in range(_MANY)}}, folder / "model.pt")


@_bomb(is_refused=True)
def dtensors_on_a_mesh_of_many_ranks(folder: Path) -> None:
    def state_dict(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (_MANY,))
        return {f"w{index}": cut(torch.zeros(_MANY + index, 1), mesh, [(0, 0)]) for index in range(30)}

    put_ranks(folder, state_dict, _MANY, only=[0])


@_bomb(is_refused=True)
def archive_of_many_members(folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        for index in range(20_000):
            archive.writestr(f"model/data/{index}", b"")


@_bomb(is_refused=True)
def pickle_that_is_compressed(folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(200 << 20))


@_bomb(is_refused=True)
def large_directory_of_many_chunks(folder: Path) -> None:
    """Let every chunk lie in the same archive, whose directory takes long to read."""
    put_together(folder, {"w": FULL})
    data = folder / "__0_0.distcp"
    edit_archive(data, lambda _, content: content)
    with zipfile.ZipFile(data, "a") as archive:
        for index in range(15_000):
            archive.writestr(f"archive/{index}", b"")
    length = data.stat().st_size

    def edit(metadata: Any) -> None:
        (entry,), (place,) = metadata.state_dict_metadata.values(), metadata.storage_data.values()
        entry.size, entry.chunks, place.length = torch.Size([8 * 1000, 5]), [], length
        for index in range(1000):
            start = torch.Size([8 * index, 0])
            entry.chunks.append(ChunkStorageMetadata(start, torch.Size([8, 5])))
            metadata.storage_data[MetadataIndex("w", start)] = place

    edit_metadata(folder, edit)


@_bomb(is_refused=True)
def chunks_that_many_tensors_share(folder: Path) -> None:
    put_together(folder, {f"w{index}": FULL for index in range(300)})

    def edit(metadata: Any) -> None:
        entries = list(metadata.state_dict_metadata.values())
        chunks = entries[0].chunks * _MANY
        for entry in entries:
            entry.chunks = chunks

    edit_metadata(folder, edit)


@_bomb(is_refused=False)
def long_paths_that_many_tensors_share(folder: Path) -> None:
    put_together(folder, {f"w{index}": FULL for index in range(100)})
    path = ("x",) * _MANY

    def edit(metadata: Any) -> None:
        metadata.planner_data = {name: (*path, name) if name == "w0" else path for name in metadata.state_dict_metadata}

    edit_metadata(folder, edit)


@_bomb(is_refused=True)
def many_extensions(folder: Path) -> None:
    put_together(folder, {f"w{index}": FULL for index in range(100)})
    names = ["x"] * _MANY

    def edit(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = names

    edit_metadata(folder, edit)


def compressed_tensor_larger_than_can_be(folder: Path) -> None:
    save(folder, {"w": FULL}, storage_writer=FileSystemWriter(folder, _extensions=[ZStandard()]))

    def edit(metadata: Any) -> None:
        (entry,) = metadata.state_dict_metadata.values()
        entry.size = torch.Size([1 << 20, 1 << 20])
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]

    edit_metadata(folder, edit)


if ZStandard.is_available():
    BOMBS.append((compressed_tensor_larger_than_can_be, True))


@_bomb(is_refused=True)
def last_of_very_many_ranks(folder: Path) -> None:
    put_together(folder, {"w": FULL}, only_rank=0)
    (folder / "__0.metadata").rename(folder / "__999999.metadata")


@_bomb(is_refused=True)
def one_of_very_many_files(folder: Path) -> None:
    write(folder, {"model-00001-of-999999.safetensors": {"w": FULL}})


@_bomb(is_refused=True)
def one_of_very_many_rank_files(folder: Path) -> None:
    folder.mkdir()
    torch.save({"w": FULL}, folder / "model_world_size_99999_rank_7.pt")


@_bomb(is_refused=True)
def row_larger_than_the_memory(folder: Path) -> None:
    size = 1 << 42
    header = {"w": {"dtype": "U8", "shape": [1, size], "data_offsets": [0, size]}}
    write_raw(folder / "model.safetensors", header)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size + size)


@_bomb(is_refused=True)
def deep_header(folder: Path) -> None:
    write_raw(folder / "model.safetensors", b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


@_bomb(is_refused=True)
def deep_index(folder: Path) -> None:
    write(folder, {"model-00001-of-00002.safetensors": {"w": FULL}})
    (folder / INDEX).write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")


def _with_config(folder: Path, config: str) -> None:
    write(folder, {"model.safetensors": {"w": FULL}})
    (folder / "config.json").write_text(config)


@_bomb(is_refused=True)
def deep_config(folder: Path) -> None:
    _with_config(folder, '{"model_type": ' + '{"a":' * 900 + "1" + "}" * 901)


@_bomb(is_refused=False)
def config_of_endless_layers(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 10**9}
    _with_config(folder, json.dumps(config))


@_bomb(is_refused=False)
def config_of_many_experts_in_many_layers(folder: Path) -> None:
    layers = {"num_hidden_layers": 1000, "num_local_experts": 1000, "hidden_size": 2, "intermediate_size": 2}
    _with_config(folder, json.dumps({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **layers}))


@_bomb(is_refused=False)
def config_that_asks_for_a_kernel(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8}
    config |= {"attn_implementation": "fuzz/canary", "_attn_implementation": "fuzz/canary", "num_attention_heads": 1}
    _with_config(folder, json.dumps({**config, "intermediate_size": 8, "vocab_size": 8}))


@_bomb(is_refused=False)
def config_without_sense(folder: Path) -> None:
    _with_config(folder, '{"architectures": {"0": 1}, "model_type": ["llama"], "text_config": 3, "auto_map": [null]}')


@_bomb(is_refused=False)
def code_too_deep_to_be_parsed(folder: Path) -> None:
    _with_config(folder, '{"model_type": "mine", "auto_map": {"AutoModel": "deep.A", "AutoConfig": "long.B"}}')
    (folder / "deep.py").write_text("-" * 100_000 + "1")
    (folder / "long.py").write_text("x = " + "+".join(["1"] * 100_000))


@_bomb(is_refused=False)
def files_beside_that_never_end(folder: Path) -> None:
    _with_config(folder, '{"model_type": "mine", "auto_map": {"AutoModel": "code.A"}}')
    for name in ("tokenizer.json", "code.py", "LATEST"):
        os.mkfifo(folder / name)
    for name in ("tokenizer_config.json", "generation_config.json", "vocab.txt"):
        (folder / name).symlink_to("/dev/zero")
    (folder / "merges.txt").write_bytes(b"")
    os.truncate(folder / "merges.txt", 1 << 42)
    (folder / "additional_chat_templates").symlink_to("additional_chat_templates")


@_bomb(is_refused=True)
def pipe_for_a_config(folder: Path) -> None:
    write(folder, {"model.safetensors": {"w": FULL}})
    os.mkfifo(folder / "config.json")


@_bomb(is_refused=True)
def pipes_for_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL}, only_rank=0)
    (folder / "__0.metadata").unlink()
    os.mkfifo(folder / "__0.metadata")


@_bomb(is_refused=True)
def pipe_for_an_index(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "pytorch_model.bin.index.json")


@_bomb(is_refused=True)
def pipe_for_the_latest_step(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "LATEST")
    os.mkfifo(folder / "latest_checkpointed_iteration.txt")


@_bomb(is_refused=False)
def strange_names(folder: Path) -> None:
    names = [
        "a\nb",
        "a\0b",
        "/etc/passwd",
        "../x",
        "x" * 5000,
        "\x1b[31m",
        "é",
        "\u202e",
        "",
        ".",
        "a b",
        '"',
        "\\",
        "\x7f",
    ]
    put_together(folder, {name: FULL + index for index, name in enumerate(names)})


@_bomb(is_refused=True)
def halves_of_characters(folder: Path) -> None:
    folder.mkdir()
    torch.save({"w": FULL, "v": FULL}, folder / "model.pt")
    edit_pickle(folder / "model.pt", (b"X\x01\x00\x00\x00v", b"X\x03\x00\x00\x00\xed\xa0\x80"))


@_bomb(is_refused=True)
def too_many_loose_values(folder: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04" + b"N" * 3_000_000)


@_bomb(is_refused=True)
def deep_tuples(folder: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04)" + b"\x85" * 500_000 + b"." + pickle.dumps(None))
