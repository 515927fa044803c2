"""State dict files that must be refused, with the messages."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_folders import as_rank, cut, edit_archive, edit_pickle
from refused.dcp import Runs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_export.errors import ExportError, NotFoundError, SourceError, UnsafeInputError, UsageError

Maker = Callable[[Path], str]

REFUSED: list[tuple[Maker, type[ExportError], str]] = []
"""Makers, which fill a folder and return what is to be read in it, `""` for itself; the error; and its message."""

FULL = torch.arange(40.0).view(8, 5)


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


def _saved(folder: Path, content: Any, name: str = "model.pt", **options: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / name, **options)
    return name


@_refused(
    SourceError,
    "the file format of torch before 1.6 in {folder}/model.pt. Write it anew: torch.save(torch.load(file, "
    "weights_only=True), file).",
)
def old_format(folder: Path) -> str:
    return _saved(folder, {"w": FULL}, _use_new_zipfile_serialization=False)


@_refused(
    SourceError,
    "the file format of torch before 1.6 in {folder}/model.pt. Write it anew: torch.save(torch.load(file, "
    "weights_only=True), file).",
)
def old_format_of_protocol_4(folder: Path) -> str:
    return _saved(folder, {"w": FULL}, _use_new_zipfile_serialization=False, pickle_protocol=4)


@_refused(
    SourceError,
    "a compressed archive in {folder}/model.pt: found model/data/0. Write it anew: torch.save(torch.load(file, "
    "weights_only=True), file).",
)
def compressed_member(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    edit_archive(folder / name, lambda _, data: data, zipfile.ZIP_DEFLATED)
    return name


@_refused(
    SourceError,
    "a TorchScript program, not a state dict, in {folder}/model.pt. Save the module's state_dict().",
)
def torch_script(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    with zipfile.ZipFile(folder / name, "a") as archive:
        archive.writestr("model/constants.pkl", b"\x80\x02).")
    return name


@_refused(
    SourceError,
    "an archive in another byte order than little-endian in {folder}/model.pt: found big. Copy the file here again, or "
    "use another step.",
)
def big_endian(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    edit_archive(folder / name, lambda member, data: b"big" if member == "byteorder" else data)
    return name


@_refused(
    SourceError,
    "no archive of torch.save in {folder}/model.pt. Copy the file here again, or use another step.",
)
def no_archive(folder: Path) -> str:
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    return "model.pt"


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found no member model/data/0. Copy the file here again, or use another "
    "step.",
)
def storage_elsewhere(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    file = folder / name
    file.write_bytes(file.read_bytes().replace(b"model/data/0", b"model/data/7"))
    return name


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found 0 members called data.pkl. Copy the file here again, or use another "
    "step.",
)
def other_zip(folder: Path) -> str:
    folder.mkdir()
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("weights/w", b"0")
    return "model.pt"


@_refused(
    SourceError,
    "no state dict in {folder}/model.pt: expected a dict, found a tensor. Save the module's state_dict().",
)
def lone_tensor(folder: Path) -> str:
    return _saved(folder, FULL)


@_refused(
    SourceError,
    "no state dict in {folder}/model.pt: expected a dict, found a list. Save the module's state_dict().",
)
def list_of_tensors(folder: Path) -> str:
    return _saved(folder, [FULL])


@_refused(
    UnsafeInputError,
    "a pickle that names torch.nn.modules.linear.Linear (nothing of it was run) in {folder}/model.pt. Find out who "
    "made the file.",
)
def whole_module(folder: Path) -> str:
    return _saved(folder, nn.Linear(2, 2))


@_refused(
    UnsafeInputError,
    "a pickle that names posix.system (nothing of it was run) in {folder}/model.pt. Find out who made the file.",
)
def foreign_name(folder: Path) -> str:
    return _saved(folder, {"model": {"w": FULL}, "config": Runs(folder / "ran")})


@_refused(SourceError, "dicts nested too deep in {folder}/model.pt. Save the module's state_dict().")
def dict_in_itself(folder: Path) -> str:
    content: dict[str, Any] = {"w": FULL}
    content["again"] = content
    return _saved(folder, content)


@_refused(SourceError, "dicts nested too deep in {folder}/model.pt. Save the module's state_dict().")
def dict_of_the_same_dict(folder: Path) -> str:
    content: dict[str, Any] = {"w": FULL}
    for _ in range(7):
        content = dict.fromkeys(map(str, range(20)), content)
    return _saved(folder, content)


@_refused(
    SourceError,
    "two entries become one key for 'a.b.w' in {folder}/model.pt: found a/b.w and a.b/w. Save the module's "
    "state_dict() alone.",
)
def keys_that_collide(folder: Path) -> str:
    return _saved(folder, {"a": {"b.w": FULL}, "a.b": {"w": FULL}})


@_refused(
    SourceError,
    "a tensor whose elements share memory for 'w' in {folder}/model.pt. Save a copy of it: tensor.contiguous().",
)
def expanded_tensor(folder: Path) -> str:
    return _saved(folder, {"w": FULL[:1].expand(8, 5)})


@_refused(
    SourceError,
    "a tensor on the meta device, which has no values, in {folder}/model.pt. Save it once its values are there.",
)
def tensor_without_values(folder: Path) -> str:
    return _saved(folder, {"w": FULL.to("meta")})


@_refused(
    SourceError,
    "a flat shard of FSDP1 for 'layers.0._flat_param' in {folder}. Save with StateDictType.SHARDED_STATE_DICT, or "
    "train with fully_shard (FSDP2).",
)
def flat_shard(folder: Path) -> str:
    return _saved(folder, {"layers.0._flat_param": FULL.flatten()})


@_refused(
    SourceError,
    "a shard of a DTensor for 'w' in {folder}/model.pt: found [4, 5] of [8, 5] on mesh 2. Name the folder with the "
    "files of all ranks, called as verl or accelerate calls them.",
)
def one_rank(folder: Path) -> str:
    with as_rank(0, 2):
        return _saved(folder, {"w": cut(FULL, init_device_mesh("cpu", (2,)), [(0, 0)])})


@_refused(
    NotFoundError,
    "only optimizer and other state, no model, in {folder}. Name the folder of the model's checkpoint.",
)
def only_an_optimizer(folder: Path) -> str:
    return _saved(folder, {"optimizer": {"state": {0: {"exp_avg": FULL}}, "param_groups": [{"lr": 0.1}]}})


@_refused(NotFoundError, "no tensor in {folder}. Name the folder of the model's checkpoint.")
def nothing_at_all(folder: Path) -> str:
    return _saved(folder, {})


@_refused(
    UsageError,
    "several prefixes that could be the model's in {folder}: found 'actor.', 'critic.'. Say which with --prefix; "
    "--prefix '' keeps the names as they are.",
)
def actor_and_critic(folder: Path) -> str:
    return _saved(folder, {"actor": {"w": FULL}, "critic": {"w": FULL}})


def _sharded(folder: Path, index: dict[str, str]) -> str:
    for number, name in enumerate(("a", "b"), 1):
        _saved(folder, {name: FULL}, f"pytorch_model-0000{number}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return ""


FILES = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}


@_refused(
    SourceError,
    "missing files in {folder}/pytorch_model.bin.index.json: found 1 of 2 files, without "
    "pytorch_model-00002-of-00002.bin. Copy the others here.",
)
def missing_file(folder: Path) -> str:
    _sharded(folder, FILES)
    (folder / FILES["b"]).unlink()
    return ""


@_refused(
    SourceError,
    "tensors that are not in the files in {folder}/pytorch_model.bin.index.json: found b, c. The files are of "
    "different saves; use another checkpoint.",
)
def missing_keys(folder: Path) -> str:
    return _sharded(folder, {"a": FILES["a"], "b": FILES["a"], "c": FILES["b"]})


@_refused(
    SourceError,
    "a damaged index in {folder}/pytorch_model.bin.index.json: found files outside of the folder. Copy the file here "
    "again, or use another step.",
)
def file_outside(folder: Path) -> str:
    return _sharded(folder, {"a": "../pytorch_model.bin"})


@_refused(
    UsageError,
    "several files that could be meant in {folder}: found ema.pt, model.pt. Name one of them.",
)
def several_files(folder: Path) -> str:
    _saved(folder, {"w": FULL})
    shutil.copy(folder / "model.pt", folder / "ema.pt")
    return ""


@_refused(
    NotFoundError,
    "no state dict in {folder}: found optimizer.bin, rng_state_0.pth, training_args.bin. Name the file that has it.",
)
def only_other_files(folder: Path) -> str:
    folder.mkdir()
    for name in ("optimizer.bin", "training_args.bin", "rng_state_0.pth"):
        (folder / name).touch()
    return ""


@_refused(
    SourceError,
    "a data file that cannot be read in {folder}/model.pt: found No such file or directory",
)
def no_such_file(folder: Path) -> str:
    return "model.pt"


def _overwrite(folder: Path, at: int, new: bytes) -> str:
    """Put bytes into the only storage's header, counted from its begin; its name is `model/data/0`."""
    name = _saved(folder, {"w": FULL})
    data = bytearray((folder / name).read_bytes())
    header = data.index(b"model/data/0") - 30
    data[header + at : header + at + len(new)] = new
    (folder / name).write_bytes(data)
    return name


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found no member at byte 598. Copy the file here again, or use another "
    "step.",
)
def storage_whose_header_has_another_length(folder: Path) -> str:
    return _overwrite(folder, 28, b"\x14")


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found no member at byte 598. Copy the file here again, or use another "
    "step.",
)
def storage_whose_header_has_another_name(folder: Path) -> str:
    return _overwrite(folder, 41, b"1")


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found a member that stands twice. Copy the file here again, or use "
    "another step.",
)
def storage_that_stands_twice(folder: Path) -> str:
    name = _saved(folder, {"w": FULL, "v": -FULL})
    file = folder / name
    at = file.read_bytes().rindex(b"model/data/1")
    file.write_bytes(file.read_bytes()[: at + 11] + b"0" + file.read_bytes()[at + 12 :])
    return name


@_refused(
    SourceError,
    "a damaged archive in {folder}/model.pt: found 9 bytes before its members. Copy the file here again, or use "
    "another step.",
)
def archive_behind_other_bytes(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    (folder / name).write_bytes(b"PK\x03\x04other" + (folder / name).read_bytes())
    return name


@_refused(
    SourceError,
    "a storage that is not as large as its pickle says in {folder}/model.pt: found 160 bytes and 164. Copy the file "
    "here again, or use another step.",
)
def longer_storage(folder: Path) -> str:
    name = _saved(folder, {"w": FULL})
    edit_archive(folder / name, lambda member, data: data + bytes(4) if member == "data/0" else data)
    return name


@_refused(
    SourceError,
    "a tensor that torch quantized in {folder}/model.pt. Save it as floating numbers: tensor.dequantize().",
)
def quantized(folder: Path) -> str:
    name = _saved(folder, {"w": FULL.to(torch.uint8)})
    edit_pickle(folder / name, (b"ctorch\nByteStorage\n", b"ctorch\nquint8\n"))
    return name


@_refused(
    SourceError,
    "a key too long to be a name in {folder}/model.pt: found 'wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww' ...",
)
def endless_name(folder: Path) -> str:
    return _saved(folder, {"w" * 20_000: FULL})
