"""DCP folders that must be refused, with the messages."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dcp_folders import edit_metadata, put_together, save
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex

from fsdp_export.errors import ExportError, NotFoundError, SourceError, UnsafeInputError, UsageError

Maker = Callable[[Path], None]

REFUSED: list[tuple[Maker, type[ExportError], str]] = []
"""Makers, what reading their folder must raise, and the message; `{folder}` stands for the folder."""

FULL = torch.arange(40.0).view(8, 5)


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


class Runs:
    """Pickled, it asks its reader to leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def _halves(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    return [(slice(0, 4), slice(0, 5)), (slice(4, 8), slice(0, 5))]


def _ranks(folder: Path, num_files: int = 2) -> None:
    put_together(folder, {f"w{index}": FULL for index in range(num_files)}, _halves, num_files=num_files)


def _replace_member(folder: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> None:
    """Write the only chunk of a folder anew, member by member."""
    put_together(folder, {"w": FULL})
    file = folder / "__0_0.distcp"
    stream = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(stream, "w") as new:
        for member in old.infolist():
            change(new, member, old.read(member))
    file.write_bytes(stream.getvalue())
    _fit(folder)


def _fit(folder: Path) -> None:
    """Make the metadata say how long the only chunk of a folder is."""
    length = (folder / "__0_0.distcp").stat().st_size
    edit_metadata(folder, lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", length))


@_refused(
    UnsafeInputError,
    "a pickle that names posix.system (nothing of it was run) in {folder}/.metadata. Find out who made the file.",
)
def foreign_name_in_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Runs(folder / "ran")))


@_refused(
    UnsafeInputError,
    "a pickle that names posix.system (nothing of it was run) for 'w' in {folder}/__0_0.distcp. Find out who made"
    " the file.",
)
def foreign_name_in_chunk(folder: Path) -> None:
    evil = pickle.dumps(Runs(folder / "ran"), 2)

    def change(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(member.filename, evil if member.filename.endswith("data.pkl") else data)

    _replace_member(folder, change)


@_refused(
    SourceError,
    "a compressed archive at byte 0 for 'w' in {folder}/__0_0.distcp: found archive/data/0. Copy the file here "
    "again, or use another step.",
)
def compressed_storage(folder: Path) -> None:
    def change(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: bytes) -> None:
        is_storage = member.filename.endswith("data/0")
        archive.writestr(member.filename, data, zipfile.ZIP_DEFLATED if is_storage else zipfile.ZIP_STORED)

    _replace_member(folder, change)


@_refused(
    SourceError,
    "an archive in another byte order than little-endian at byte 0 for 'w' in {folder}/__0_0.distcp: found big. "
    "Copy the file here again, or use another step.",
)
def big_endian(folder: Path) -> None:
    def change(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(member.filename, b"big" if member.filename.endswith("byteorder") else data)

    _replace_member(folder, change)


@_refused(
    SourceError,
    "a tensor larger than its storage at byte 0 for 'w' in {folder}/__0_0.distcp: found 80 bytes. Copy the file "
    "here again, or use another step.",
)
def shorter_storage(folder: Path) -> None:
    def change(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(member.filename, data[:80] if member.filename.endswith("data/0") else data)

    _replace_member(folder, change)


@_refused(
    SourceError,
    "a damaged archive at byte 0 for 'w' in {folder}/__0_0.distcp: found File is not a zip file. Copy the file "
    "here again, or use another step.",
)
def damaged_archive(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-22] + bytes(22))


@_refused(
    SourceError,
    "no archive at byte 0 for 'w' in {folder}/__0_0.distcp. Copy the file here again, or use another step.",
)
def no_archive(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    file = folder / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))


def _save_as_safetensors(folder: Path) -> None:
    writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    save(folder, {"v": FULL + 1, "w": FULL}, storage_writer=writer)


@_refused(
    SourceError,
    "a truncated safetensors file in {folder}/__0_0.distcp: expected 592 bytes, found 591. Copy the file here again, "
    "or use another step.",
)
def truncated_safetensors(folder: Path) -> None:
    _save_as_safetensors(folder)
    os.truncate(folder / "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size - 1)


@_refused(
    SourceError,
    "a chunk that is not what the metadata say for 'v' in {folder}/__0_0.distcp: expected the tensor, found others "
    "only. The files are of different saves; use another step.",
)
def other_tensors_in_safetensors(folder: Path) -> None:
    _save_as_safetensors(folder)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b'"v"', b'"u"').replace(b'"v\\"', b'"u\\"'))


@_refused(
    SourceError,
    "a chunk that is not what the metadata say for 'w' in {folder}/__0_0.distcp: expected elements from [0, 0], found "
    "those from [4, 0]. The files are of different saves; use another step.",
)
def other_rows_in_safetensors(folder: Path) -> None:
    writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    save(folder, {"w": FULL}, storage_writer=writer)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"[0, 0]", b"[4, 0]"))


@_refused(
    SourceError,
    "a tensor changed by extensions that are not known for 'w' in {folder}: expected stream.zstd/1, found "
    "stream.rot13/1. Save without them.",
)
def unknown_extension(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    _set_descriptors(folder, ["stream.rot13/1"])


@_refused(
    SourceError,
    "a tensor changed by extensions that are not known for 'w' in {folder}: expected stream.zstd/1, found "
    "stream.rot13/1, stream.zstd/1. Save without them.",
)
def two_extensions(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    _set_descriptors(folder, ["stream.rot13/1", "stream.zstd/1"])


@_refused(
    SourceError,
    "metadata that make no sense for 'w' in {folder}/.metadata: found extensions without names. Copy the file here "
    "again, or use another step.",
)
def nameless_extension(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    _set_descriptors(folder, [3])


def _set_descriptors(folder: Path, descriptors: list[Any]) -> None:
    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = descriptors

    edit_metadata(folder, edit)


@_refused(
    SourceError,
    "a chunk that is not what the metadata say for 'w' in {folder}/__0_0.distcp: expected [8, 5] torch.float32, "
    "found [8, 4] torch.float32. The files are of different saves; use another step.",
)
def wrong_shape_in_chunk(folder: Path) -> None:
    put_together(folder, {"w": FULL}, stored_as=lambda tensor: tensor[:, :4].contiguous())


@_refused(
    SourceError,
    "a chunk that is not what the metadata say for 'w' in {folder}/__0_0.distcp: expected [8, 5] torch.float32, "
    "found [8, 5] torch.float64. The files are of different saves; use another step.",
)
def wrong_dtype_in_chunk(folder: Path) -> None:
    put_together(folder, {"w": FULL}, stored_as=torch.Tensor.double)


@_refused(
    SourceError,
    "a damaged pickle for 'w' in {folder}/__0_0.distcp: found a tensor that is yet to be conjugated or negated "
    "before byte 174. Copy the file here again, or use another step.",
)
def conjugated_chunk(folder: Path) -> None:
    put_together(folder, {"w": FULL.to(torch.complex64)}, stored_as=torch.Tensor.conj)


@_refused(
    SourceError,
    "a tensor whose elements share memory for 'w' in {folder}/__0_0.distcp. Save a copy of it: tensor.contiguous().",
)
def elements_that_share_memory(folder: Path) -> None:
    put_together(folder, {"w": FULL}, stored_as=lambda tensor: tensor[:1].expand(8, 5))


@_refused(
    SourceError,
    "a pickle without a tensor for 'w' in {folder}/__0_0.distcp. The files are of different saves; use another step.",
)
def no_tensor_in_chunk(folder: Path) -> None:
    put_together(folder, {"w": FULL}, stored_as=lambda _: 3)


@_refused(
    UnsafeInputError,
    "a pickle that names torch._utils._rebuild_sparse_tensor (nothing of it was run) for 'w' in "
    "{folder}/__0_0.distcp. Find out who made the file.",
)
def sparse_chunk(folder: Path) -> None:
    put_together(folder, {"w": FULL}, stored_as=torch.Tensor.to_sparse)


@_refused(
    SourceError,
    "missing __1_0.distcp (rank 1) in {folder}: expected data files of 2 ranks, found those of 1. Node-local "
    "disks are the usual cause: copy the others here.",
)
def missing_data(folder: Path) -> None:
    _ranks(folder)
    (folder / "__1_0.distcp").unlink()


@_refused(
    SourceError,
    "missing __2_0.distcp (rank 2), __3_0.distcp (rank 3) in {folder}: expected data files of 4 ranks, found "
    "those of 2. Node-local disks are the usual cause: copy the others here.",
)
def half_of_the_nodes(folder: Path) -> None:
    _ranks(folder, 4)
    (folder / "__2_0.distcp").unlink()
    (folder / "__3_0.distcp").unlink()


@_refused(
    SourceError,
    "truncated data files in {folder}: found __1_0.distcp (rank 1) with 2,000 of 3,410 bytes. Copy them here "
    "again, or use another step.",
)
def truncated_data(folder: Path) -> None:
    _ranks(folder)
    os.truncate(folder / "__1_0.distcp", 2000)


@_refused(
    SourceError,
    "a damaged pickle in {folder}/.metadata: found an early end before byte 297. Copy the file here again, or use"
    " another step.",
)
def truncated_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    os.truncate(folder / ".metadata", 300)


@_refused(
    SourceError,
    "a damaged pickle in {folder}/.metadata: found an early end before byte 0. Copy the file here again, or use "
    "another step.",
)
def empty_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    os.truncate(folder / ".metadata", 0)


@_refused(
    SourceError, "metadata that cannot be read in {folder}/.metadata: found 2,147,483,649 bytes, which is too large"
)
def boundless_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    os.truncate(folder / ".metadata", (2 << 30) + 1)


@_refused(
    SourceError,
    "metadata that make no sense in {folder}/.metadata: found no Metadata. Copy the file here again, or use "
    "another step.",
)
def no_checkpoint_pickled(folder: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))


@_refused(
    SourceError,
    "chunks that leave a hole for 'w' in {folder}/.metadata: found no data for some of rows 3:5 of 8. The "
    "checkpoint is incomplete; use another step.",
)
def hole(folder: Path) -> None:
    put_together(folder, {"w": FULL}, lambda _: [(slice(0, 3), slice(0, 5)), (slice(5, 8), slice(0, 5))])


@_refused(
    SourceError,
    "chunks that leave a hole for 'w' in {folder}/.metadata: found no data for some of rows 4:8 of 8. The "
    "checkpoint is incomplete; use another step.",
)
def hole_in_a_grid(folder: Path) -> None:
    put_together(folder, {"w": FULL}, lambda tensor: [*_halves(tensor)[:1], (slice(4, 8), slice(0, 3))])


@_refused(
    SourceError,
    "chunks that leave a hole for 's' in {folder}/.metadata: found no data. The checkpoint is incomplete; use another "
    "step.",
)
def scalar_without_a_chunk(folder: Path) -> None:
    put_together(folder, {"s": FULL[0, 0]})
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata["s"].chunks.clear())


@_refused(
    SourceError,
    "chunks that overlap for 'w' in {folder}/.metadata: found [0:5, 0:5] in __0_0.distcp and [4:8, 0:5] in "
    "__0_0.distcp. The files are of different saves; use another step.",
)
def overlap(folder: Path) -> None:
    put_together(folder, {"w": FULL}, lambda _: [(slice(0, 5), slice(0, 5)), (slice(4, 8), slice(0, 5))])


@_refused(
    SourceError,
    "metadata that make no sense for 'w' in {folder}/.metadata: found a chunk up to (8, 5) of a tensor of shape "
    "(6, 5). Copy the file here again, or use another step.",
)
def chunk_outside(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    edit_metadata(folder, lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size([6, 5])))


@_refused(
    SourceError,
    "metadata that make no sense for 'w' in {folder}/.metadata: found no data file of the chunk at (4, 0). Copy "
    "the file here again, or use another step.",
)
def chunk_without_place(folder: Path) -> None:
    put_together(folder, {"w": FULL}, _halves)
    edit_metadata(folder, lambda metadata: metadata.storage_data.pop(MetadataIndex("w", (4, 0))))


@_refused(
    SourceError,
    "metadata that make no sense in {folder}/.metadata: found a data file outside of the folder. Copy the file "
    "here again, or use another step.",
)
def file_outside(folder: Path) -> None:
    put_together(folder, {"w": FULL})

    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../secret"

    edit_metadata(folder, edit)


@_refused(
    NotFoundError,
    "only optimizer and other state, no model, in {folder}. Name the folder of the model's checkpoint.",
)
def optimizer_only(folder: Path) -> None:
    save(folder, {"optimizer": {"state": {"w": {"exp_avg": FULL}}, "param_groups": [{"lr": 1.0}]}})


@_refused(
    NotFoundError,
    "no tensor in {folder}. Name the folder of the model's checkpoint.",
)
def no_tensors(folder: Path) -> None:
    save(folder, {"step": 3})


@_refused(
    SourceError,
    "a flat shard of FSDP1 for 'layers.0._fsdp_wrapped_module._flat_param' in {folder}. Save with "
    "StateDictType.SHARDED_STATE_DICT, or train with fully_shard (FSDP2).",
)
def flat_shard(folder: Path) -> None:
    put_together(folder, {"layers.0._fsdp_wrapped_module._flat_param": FULL.flatten()})


@_refused(
    UsageError,
    "several prefixes that could be the model's in {folder}: found 'actor.', 'critic.'. Say which with --prefix; "
    "--prefix '' keeps the names as they are.",
)
def actor_and_critic(folder: Path) -> None:
    save(folder, {"actor": {"w": FULL}, "critic": {"w": FULL}})


@_refused(
    UsageError,
    "several prefixes that could be the model's in {folder}: found '', 'model.'. Say which with --prefix; "
    "--prefix '' keeps the names as they are.",
)
def no_record_of_nesting(folder: Path) -> None:
    put_together(folder, {"model.embed.weight": FULL})
    edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", None))


@_refused(
    SourceError,
    "two keys become one name for 'w' in {folder}: found 'w' and '_orig_mod.w'. Save the model without its wrapper.",
)
def colliding_names(folder: Path) -> None:
    put_together(folder, {"w": FULL, "_orig_mod.w": FULL})


@_refused(
    SourceError,
    "no .metadata in {folder}: found data files of ranks 8-15, 31. Rank 0 writes it when all others are done: "
    "copy it here from its node.",
)
def no_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL}, _halves)
    (folder / ".metadata").unlink()
    (folder / "__0_0.distcp").unlink()
    for rank in (*range(8, 16), 31):
        (folder / f"__{rank}_0.distcp").touch()


@_refused(
    SourceError,
    "no .metadata in {folder}: found data files of rank 0 and .metadata.tmp, left by a save that did not finish. "
    "Rename it to .metadata to try it, or use another step.",
)
def unfinished_save(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    (folder / ".metadata").rename(folder / ".metadata.tmp")


def _save_per_rank(folder: Path, *ranks: int, of: int = 2) -> None:
    """Save as some of the ranks do with `use_collectives=False`: each a part of the rows, and a whole copy."""
    rows = 8 // of
    for rank in ranks:

        def blocks_of(tensor: torch.Tensor, rank: int = rank) -> list[tuple[slice, ...]]:
            is_copy = tensor.dim() == 1
            return [(slice(0, 5),)] if is_copy else [(slice(rows * rank, rows * (rank + 1)), slice(0, 5))]

        put_together(folder, {"w": FULL, "n": FULL[0]}, blocks_of, only_rank=rank)


@_refused(
    SourceError,
    "missing __1.metadata, __3.metadata in {folder}: expected metadata of 4 ranks, found those of ranks 0, 2. "
    "Node-local disks are the usual cause: copy the others here.",
)
def metadata_of_some_ranks(folder: Path) -> None:
    _save_per_rank(folder, 0, 2, of=4)
    (folder / "__3_0.distcp").touch()


@_refused(
    SourceError,
    "chunks that leave a hole for 'w' in {folder}: found no data for some of rows 6:8 of 8. The checkpoint is "
    "incomplete; use another step.",
)
def no_trace_of_the_last_rank(folder: Path) -> None:
    _save_per_rank(folder, 0, 1, 2, of=4)


@_refused(
    SourceError,
    "missing __1_0.distcp (rank 1) in {folder}: expected data files of 2 ranks, found those of 1. Node-local disks "
    "are the usual cause: copy the others here.",
)
def metadata_of_a_rank_without_its_data(folder: Path) -> None:
    _save_per_rank(folder, 0, 1)
    (folder / "__1_0.distcp").unlink()


@_refused(
    SourceError,
    "chunks that overlap for 'w' in {folder}: found [0:2, 0:5] in __0_0.distcp and [0:4, 0:5] in __1_0.distcp. The "
    "files are of different saves; use another step.",
)
def ranks_of_two_saves(folder: Path) -> None:
    _save_per_rank(folder, 0, 1, 2, 3, of=4)
    _save_per_rank(folder, 1, of=2)
    put_together(folder, {"w": FULL}, lambda _: [(slice(0, 4), slice(0, 5))], only_rank=1)


@_refused(
    SourceError,
    "ranks that saved different tensors under one name for 'w' in {folder}: expected [8, 5] torch.float32 as in "
    "__0.metadata, found [4, 5] torch.float32 in __1.metadata. Use another step.",
)
def ranks_that_disagree(folder: Path) -> None:
    _save_per_rank(folder, 0)
    put_together(folder, {"w": FULL[:4]}, only_rank=1)


@_refused(
    SourceError,
    "a tensor of which ranks saved different copies for 'n' in {folder}: found __0_0.distcp and __1_0.distcp. Save it "
    "as a DTensor if it is sharded, or leave it out with --exclude.",
)
def copies_that_differ(folder: Path) -> None:
    put_together(folder, {"n": FULL[0]}, only_rank=0)
    put_together(folder, {"n": FULL[1]}, only_rank=1)


@_refused(
    SourceError,
    "metadata that make no sense for 'w' in {folder}/.metadata: found 159 bytes of data of the 160 of the chunk at "
    "(0, 0). Copy the file here again, or use another step.",
)
def place_that_is_too_small(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    edit_metadata(folder, lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", 159))


@_refused(
    NotFoundError,
    "no DCP checkpoint in {folder}: found No such file or directory. Name the folder that has them.",
)
def no_folder(folder: Path) -> None:
    assert not folder.exists()


@_refused(
    NotFoundError,
    "no DCP checkpoint in {folder}: expected .metadata and *.distcp files, found config.json, model.safetensors. "
    "Name the folder that has them.",
)
def other_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()


def _replace_in_metadata(folder: Path, old: bytes, new: bytes) -> None:
    data = (folder / ".metadata").read_bytes()
    assert old in data
    (folder / ".metadata").write_bytes(data.replace(old, new, 1))


@_refused(
    SourceError,
    "tensors without an entry in {folder}/.metadata: found 'v'. Copy the file here again, or use another step.",
)
def tensor_without_an_entry(folder: Path) -> None:
    put_together(folder, {"w": FULL, "v": FULL})
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata.pop("v"))


@_refused(
    SourceError,
    "metadata that make no sense for 'model.embex' in {folder}/.metadata: found a name that is not made of its keys. "
    "Copy the file here again, or use another step.",
)
def name_that_is_not_made_of_its_keys(folder: Path) -> None:
    save(folder, {"model": {"embed": FULL, "head": FULL}})
    _replace_in_metadata(folder, b"model.embed", b"model.embex")


@_refused(
    SourceError,
    "metadata that make no sense in {folder}/.metadata: found one entry under two names. Copy the file here again, or "
    "use another step.",
)
def one_entry_under_two_names(folder: Path) -> None:
    put_together(folder, {"w": FULL, "v": FULL})
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata.update(v=metadata.state_dict_metadata["w"]))


@_refused(SourceError, "metadata that cannot be read in {folder}/.metadata: found Not a regular file")
def pipe_for_metadata(folder: Path) -> None:
    put_together(folder, {"w": FULL})
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
