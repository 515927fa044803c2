"""Folders of rank files that must be refused, with the messages."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_folders import cut, edit_archive, edit_pickle, put_ranks, rank_file
from ranks import run_ranks
from refused.dcp import Runs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial

from fsdp_export.errors import ExportError, NotFoundError, SourceError, UnsafeInputError, UsageError

Maker = Callable[[Path], None]

REFUSED: list[tuple[Maker, type[ExportError], str]] = []
"""Makers, what reading their folder must raise, and the message; `{folder}` stands for the folder."""

FULL = torch.arange(40.0).view(8, 5)
SAVED = Path(__file__).parents[1] / "sources" / "rank_files"


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


def _on_mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def _shards(rank: int, full: torch.Tensor = FULL, size: int = 2, **spec: Any) -> dict[str, Any]:
    return {"w": cut(full, _on_mesh(size), [(0, 0)], **spec)}


@_refused(
    NotFoundError,
    "no rank files in {folder}: expected model_world_size_{W}_rank_{r}.pt or pytorch_model_fsdp_0_rank{r}.bin, found "
    "config.json, optim_world_size_2_rank_0.pt. Name the folder that has them.",
)
def other_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "optim_world_size_2_rank_0.pt").touch()


@_refused(NotFoundError, "no rank files in {folder}: found No such file or directory. Name the folder that has them.")
def no_folder(folder: Path) -> None:
    pass


@_refused(
    SourceError,
    "missing rank files in {folder}: found 3 of 4 (rank 2 is missing). Node-local disks are the usual cause: copy "
    "the others here.",
)
def missing_file(folder: Path) -> None:
    put_ranks(folder, partial(_shards, size=4), 4)
    (folder / rank_file(2, 4)).unlink()


@_refused(
    SourceError,
    "missing rank files in {folder}: found 2 of 12 (ranks 0-7, 10-11 are missing). Node-local disks are the usual "
    "cause: copy the others here.",
)
def missing_node(folder: Path) -> None:
    put_ranks(folder, partial(_shards, size=12), 12, name=lambda rank, _: f"pytorch_model_fsdp_0_rank{rank}.bin")
    for rank in (*range(8), 10, 11):
        (folder / f"pytorch_model_fsdp_0_rank{rank}.bin").unlink()


@_refused(
    SourceError,
    "missing rank files in {folder}: found 1 of 2 (rank 1 is missing). Node-local disks are the usual cause: copy "
    "the others here.",
)
def missing_file_of_plain_tensors(folder: Path) -> None:
    put_ranks(folder, lambda _: {"w": FULL}, 2)
    (folder / rank_file(1, 2)).unlink()


@_refused(
    UsageError,
    "rank files of several saves in {folder}: found model_world_size_2 (2 files), model_world_size_4 (1 file). Name "
    "a file of the one that is meant.",
)
def two_world_sizes(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    shutil.copy(folder / rank_file(0, 2), folder / rank_file(0, 4))


@_refused(
    SourceError,
    "plain tensors that differ from rank to rank for 'w' in {folder}: expected DTensors, or the same values in every "
    "file, found other values in model_world_size_2_rank_1.pt than in model_world_size_2_rank_0.pt. Nothing tells how "
    "they make up one tensor: save DTensors, not to_local().",
)
def local_tensors(folder: Path) -> None:
    put_ranks(folder, lambda rank: {"w": _shards(rank)["w"].to_local()}, 2)


@_refused(
    SourceError,
    "plain tensors that differ from rank to rank for 'w' in {folder}: expected DTensors, or the same values in every "
    "file, found [3, 5] and [2, 5]. Nothing tells how they make up one tensor: save DTensors, not to_local().",
)
def uneven_local_tensors(folder: Path) -> None:
    put_ranks(folder, lambda rank: {"w": _shards(rank, FULL[:5])["w"].to_local()}, 2)


@_refused(
    SourceError,
    "plain tensors that differ from rank to rank for 'mean' in {folder}: expected DTensors, or the same values in "
    "every file, found other values in model_world_size_2_rank_1.pt than in model_world_size_2_rank_0.pt. Nothing "
    "tells how they make up one tensor: save DTensors, not to_local().",
)
def differing_buffer(folder: Path) -> None:
    put_ranks(folder, lambda rank: {**_shards(rank), "mean": torch.tensor(float(rank))}, 2)


@_refused(
    SourceError,
    "a local tensor that is not what its placements say for 'w' in {folder}/model_world_size_2_rank_1.pt: expected "
    "[3, 5], found [4, 5]. Save a state dict whose DTensors are as torch sharded them.",
)
def padded_local_tensor(folder: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        shards = _shards(rank, FULL[:7])
        shards["w"]._local_tensor = FULL[:4].clone()
        return shards

    put_ranks(folder, state_dict, 2)


@_refused(
    SourceError,
    "rank files that differ for 'w' in {folder}/model_world_size_2_rank_1.pt: found a DTensor on mesh 2 [8, 5] "
    "torch.float32 in model_world_size_2_rank_0.pt and a DTensor on mesh 2 [6, 5] torch.float32. The files are of "
    "different saves; use another step.",
)
def other_global_shape(folder: Path) -> None:
    put_ranks(folder, lambda rank: _shards(rank, FULL[: 8 - 2 * rank]), 2)


@_refused(
    SourceError,
    "rank files that differ for 'w' in {folder}/model_world_size_2_rank_1.pt: found a DTensor on mesh 2 [8, 5] "
    "torch.float32 in model_world_size_2_rank_0.pt and a plain tensor [8, 5] torch.float32. The files are of "
    "different saves; use another step.",
)
def sharded_and_plain(folder: Path) -> None:
    put_ranks(folder, lambda rank: {"w": FULL} if rank else _shards(rank), 2)


@_refused(
    SourceError,
    "the file of another rank in {folder}/model_world_size_2_rank_0.pt: expected that of rank 0, found that of rank 1."
    " Give every file the name back under which it was saved.",
)
def swapped_files(folder: Path) -> None:
    put_ranks(folder, _shards, 2, name=lambda rank, world_size: rank_file(1 - rank, world_size))


@_refused(
    SourceError,
    "the file of another rank in {folder}/model_world_size_4_rank_1.pt: expected that of rank 1, found that of rank 0."
    " Give every file the name back under which it was saved.",
)
def copied_file_of_torch_2_8(folder: Path) -> None:
    zipfile.ZipFile(SAVED / "torch-2.8.0.zip").extractall(folder)
    shutil.copy(folder / rank_file(0, 4), folder / rank_file(1, 4))


@_refused(
    SourceError,
    "blocks that no file has for 'v' in {folder}: found no block of rank 1. The files are of different saves; use "
    "another step.",
)
def tensor_of_one_rank_alone(folder: Path) -> None:
    put_ranks(folder, lambda rank: _shards(rank) | ({} if rank else {"v": _shards(rank)["w"]}), 2)


@_refused(
    SourceError,
    "a placement that cannot be exported for 'w': expected Shard or Replicate, found Partial. Redistribute the tensor "
    "before the export.",
)
def partial_sums(folder: Path) -> None:
    put_ranks(folder, partial(_shards, placements=(Partial(),)), 2)


@_refused(
    SourceError,
    "a strided shard that does not follow its mesh for 'w': expected a split factor that mesh axes after 0 of 2 make "
    "up, found 3. Redistribute the tensor to plain Shard placements before the export.",
)
def strided_beyond_its_mesh(folder: Path) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    put_ranks(folder, partial(_shards, placements=(_StridedShard(0, split_factor=3),)), 2)


@_refused(
    SourceError,
    "a DTensor that makes no sense for 'w' in {folder}/model_world_size_4_rank_0.pt: found a dim cut by two axes, "
    "whose order torch before 2.5 did not save. Copy the file here again, or use another step.",
)
def two_cuts_by_torch_before_2_5(folder: Path) -> None:
    put_ranks(folder, lambda _: {"w": cut(FULL, _on_mesh(2, 2), [(0, 0), (0, 1)])}, 4)
    old = b"torch.distributed._tensor."
    for rank in range(4):
        edit_pickle(
            folder / rank_file(rank, 4),
            (b"torch.distributed.tensor.placement_types", old + b"placement_types"),
            (b"torch.distributed.tensor\nDTensor", old + b"api\nDTensor"),
        )


def _save_fsdp1_without_mesh(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            torch.save(model.state_dict(), folder / rank_file(dist.get_rank(), 2))


@_refused(
    SourceError,
    "a ShardedTensor of FSDP1 in {folder}/model_world_size_2_rank_0.pt. Pass FSDP a device_mesh, which makes it save "
    "DTensors, or train with fully_shard (FSDP2).",
)
def sharded_tensors(folder: Path) -> None:
    folder.mkdir()
    run_ranks(_save_fsdp1_without_mesh, 2, folder)


@_refused(
    SourceError,
    "a flat shard of FSDP1 for '_fsdp_wrapped_module._flat_param' in {folder}. Save with "
    "StateDictType.SHARDED_STATE_DICT, or train with fully_shard (FSDP2).",
)
def flat_shards(folder: Path) -> None:
    put_ranks(folder, lambda rank: {"_fsdp_wrapped_module._flat_param": FULL.flatten()[rank * 20 :][:20].clone()}, 2)


@_refused(
    UnsafeInputError,
    "a pickle that names posix.system (nothing of it was run) in {folder}/model_world_size_2_rank_1.pt. Find out who "
    "made the file.",
)
def foreign_name(folder: Path) -> None:
    put_ranks(folder, lambda rank: {**_shards(rank), "config": Runs(folder / "ran") if rank else 0}, 2)


@_refused(
    SourceError,
    "a damaged archive in {folder}/model_world_size_2_rank_1.pt: found File is not a zip file. Copy the file here "
    "again, or use another step.",
)
def truncated_file(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    file = folder / rank_file(1, 2)
    file.write_bytes(file.read_bytes()[:-100])


@_refused(
    SourceError,
    "no archive of torch.save in {folder}/model_world_size_2_rank_1.pt. Copy the file here again, or use another step.",
)
def empty_file(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    (folder / rank_file(1, 2)).write_bytes(b"")


@_refused(
    SourceError,
    "a compressed archive in {folder}/model_world_size_2_rank_0.pt: found model_world_size_2_rank_0/data/0. Write it "
    "anew: torch.save(torch.load(file, weights_only=True), file).",
)
def compressed_member(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    edit_archive(folder / rank_file(0, 2), lambda _, data: data, zipfile.ZIP_DEFLATED)


@_refused(
    SourceError,
    "a damaged archive in {folder}/model_world_size_2_rank_0.pt: found another checksum of "
    "model_world_size_2_rank_0/data.pkl. Copy the file here again, or use another step.",
)
def damaged_pickle(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    file = folder / rank_file(0, 2)
    file.write_bytes(file.read_bytes().replace(b"DTensorSpec", b"DTensorSpek", 1))


@_refused(
    SourceError,
    "a tensor larger than its storage in {folder}/model_world_size_2_rank_0.pt: found 40 bytes. Copy the file here "
    "again, or use another step.",
)
def shorter_storage(folder: Path) -> None:
    put_ranks(folder, _shards, 2)
    edit_archive(folder / rank_file(0, 2), lambda name, data: data[:40] if name == "data/0" else data)


@_refused(
    NotFoundError,
    "only optimizer and other state, no model, in {folder}. Name the folder of the model's checkpoint.",
)
def only_an_optimizer(folder: Path) -> None:
    put_ranks(folder, lambda rank: {"optimizer": {"state": {"w": {"exp_avg": _shards(rank)["w"]}}}}, 2)


@_refused(
    SourceError,
    "plain tensors that differ from rank to rank for 'v' in {folder}: expected DTensors, or the same values in every "
    "file, found it in 1 of 2 files. Nothing tells how they make up one tensor: save DTensors, not to_local().",
)
def plain_tensor_of_one_rank_alone(folder: Path) -> None:
    put_ranks(folder, lambda rank: _shards(rank) | ({} if rank else {"v": FULL}), 2)
