"""Folders of safetensors that must be refused, with the messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_folders import INDEX, write, write_index, write_raw, write_shard

from fsdp_export.errors import ExportError, NotFoundError, SourceError, UsageError

Maker = Callable[[Path], None]

REFUSED: list[tuple[Maker, type[ExportError], str]] = []
"""Makers, what reading their folder must raise, and the message; `{folder}` stands for the folder."""

FULL = torch.arange(40.0).view(8, 5)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TWO = {FIRST: {"a": FULL}, SECOND: {"b": FULL}}


def _refused(error: type[ExportError], message: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        REFUSED.append((maker, error, message))
        return maker

    return register


def _entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _raw(folder: Path, header: Any, data: bytes = bytes(8), **options: Any) -> None:
    write_raw(folder / "model.safetensors", header, data, **options)


@_refused(
    SourceError,
    f"an index that points to files that are no safetensors in {{folder}}/{INDEX}: found pytorch_model.bin, rest.pt. "
    "Name a folder whose index lists safetensors files.",
)
def index_of_pickles(folder: Path) -> None:
    write(folder, {FIRST: {"a": FULL}}, index={"a": FIRST, "b": "pytorch_model.bin", "c": "rest.pt"})


@_refused(
    SourceError,
    f"missing {SECOND} in {{folder}}: expected 2 weight files, found 1. Copy the others here, or use another step.",
)
def index_of_a_missing_file(folder: Path) -> None:
    write(folder, TWO, index=True)
    (folder / SECOND).unlink()


@_refused(
    SourceError,
    f"tensors that the index lists and its files do not have in {{folder}}/{INDEX}: found 'c' ({SECOND}), 'd' "
    f"({SECOND}). The files are of different saves; use another step.",
)
def index_of_missing_tensors(folder: Path) -> None:
    write(folder, TWO, index={"a": FIRST, "b": SECOND, "c": SECOND, "d": SECOND})


@_refused(
    SourceError,
    f"tensors that the index lists and its files do not have in {{folder}}/{INDEX}: found 'a' ({SECOND}), 'b' "
    f"({FIRST}). The files are of different saves; use another step.",
)
def index_of_the_wrong_files(folder: Path) -> None:
    write(folder, TWO, index={"a": SECOND, "b": FIRST})


@_refused(
    SourceError,
    f"tensors that the files have and the index does not list in {{folder}}/{INDEX}: found 'c' ({FIRST}). The files "
    "are of different saves; use another step.",
)
def tensors_that_the_index_lacks(folder: Path) -> None:
    write(folder, {FIRST: {"a": FULL, "c": FULL}, SECOND: {"b": FULL}}, index={"a": FIRST, "b": SECOND})


@_refused(
    SourceError,
    f"weight files that the index does not list in {{folder}}/{INDEX}: expected {FIRST}, {SECOND}, found also "
    "model.safetensors. They are of two saves: move those away that are not meant.",
)
def a_file_of_an_older_save(folder: Path) -> None:
    write(folder, TWO, index=True)
    write(folder, {"model.safetensors": {"a": FULL, "b": FULL}})


@_refused(
    SourceError,
    f"weight files that the index does not list in {{folder}}/{INDEX}: expected {FIRST}, {SECOND}, found also "
    "model-00003-of-00003.safetensors. They are of two saves: move those away that are not meant.",
)
def a_shard_of_an_older_save(folder: Path) -> None:
    write(folder, TWO, index=True)
    write(folder, {"model-00003-of-00003.safetensors": {"a": FULL}})


@_refused(
    SourceError,
    f"missing {FIRST}, {SECOND} in {{folder}}: expected 2 weight files, found 0. Copy the others here, or use another "
    "step.",
)
def an_index_of_an_older_save(folder: Path) -> None:
    write(folder, {"model.safetensors": {"a": FULL}})
    write_index(folder, {"a": FIRST, "b": SECOND})


@_refused(
    SourceError,
    f"a damaged index in {{folder}}/{INDEX}: found files outside of the folder. Copy the file here again, or use "
    "another step.",
)
def index_of_a_file_outside(folder: Path) -> None:
    write(folder, {"model.safetensors": {"a": FULL}}, index={"a": "../model.safetensors"})


@_refused(
    SourceError,
    f"a damaged index in {{folder}}/{INDEX}: found no weight_map. Copy the file here again, or use another step.",
)
def index_without_a_map(folder: Path) -> None:
    folder.mkdir()
    (folder / INDEX).write_text("[]")


@_refused(
    SourceError,
    f"a damaged index in {{folder}}/{INDEX}: found Expecting value: line 1 column 31 (char 30). Copy the file here "
    "again, or use another step.",
)
def truncated_index(folder: Path) -> None:
    write(folder, TWO, index=True)
    os.truncate(folder / INDEX, 30)


@_refused(
    SourceError, f"an index that cannot be read in {{folder}}/{INDEX}: found 268,435,457 bytes, which is too large"
)
def boundless_index(folder: Path) -> None:
    write(folder, TWO, index=True)
    os.truncate(folder / INDEX, (256 << 20) + 1)


@_refused(
    SourceError,
    f"a damaged index in {{folder}}/{INDEX}: found a key that stands twice. Copy the file here again, or use another "
    "step.",
)
def index_with_a_tensor_twice(folder: Path) -> None:
    write(folder, TWO)
    (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')


@_refused(
    UsageError,
    "several indexes in {folder}: found unet.fp16.safetensors.index.json, unet.safetensors.index.json. Name one of "
    "them.",
)
def two_indexes(folder: Path) -> None:
    folder.mkdir()
    for name in ("unet.safetensors.index.json", "unet.fp16.safetensors.index.json"):
        write_index(folder, {"a": "a.safetensors"}, name)


@_refused(
    SourceError,
    "missing model-00001-of-00003.safetensors, model-00003-of-00003.safetensors in {folder}: expected 3 weight files, "
    "found 1. Copy the others here, or use another step.",
)
def one_of_three_files(folder: Path) -> None:
    write(folder, {"model-00002-of-00003.safetensors": {"a": FULL}})


@_refused(
    SourceError,
    f"weights of two saves in {{folder}}: found {FIRST}, {SECOND}, model.safetensors. Move those away that are not "
    "meant.",
)
def one_file_and_two(folder: Path) -> None:
    write(folder, TWO | {"model.safetensors": {"a": FULL}})


@_refused(
    SourceError,
    f"weights of two saves in {{folder}}: found {FIRST}, model-00001-of-00003.safetensors, {SECOND}. Move those away "
    "that are not meant.",
)
def two_files_and_one_of_three(folder: Path) -> None:
    write(folder, TWO | {"model-00001-of-00003.safetensors": {"a": FULL}})


@_refused(
    SourceError,
    "weights of two saves in {folder}: found model-00001-of-00001.safetensors, "
    "model.safetensors-00001-of-00001.safetensors. Move those away that are not meant.",
)
def two_ways_to_number_files(folder: Path) -> None:
    names = ("model-00001-of-00001.safetensors", "model.safetensors-00001-of-00001.safetensors")
    write(folder, {name: {"a": FULL} for name in names})


@_refused(
    SourceError,
    f"a tensor in several files that do not say which part of it they have for 'a' in {{folder}}: found {FIRST}, "
    f"{SECOND}. Save with torch's HuggingFaceStorageWriter, or whole tensors.",
)
def a_tensor_in_two_files(folder: Path) -> None:
    write(folder, {FIRST: {"a": FULL}, SECOND: {"a": FULL}})


@_refused(
    UsageError,
    "several weight files and no index in {folder}: found text.safetensors, vision.safetensors. Name one of them, or "
    "the index.",
)
def files_that_could_be_anything(folder: Path) -> None:
    write(folder, {"text.safetensors": {"a": FULL}, "vision.safetensors": {"b": FULL}})


@_refused(
    NotFoundError,
    "no weights in safetensors in {folder}: found adapter_config.json, adapter_model.safetensors. Name the folder that "
    "has them.",
)
def only_an_adapter(folder: Path) -> None:
    write(folder, {"adapter_model.safetensors": {"a": FULL}})
    (folder / "adapter_config.json").touch()


@_refused(
    NotFoundError, "no folder of weights in {folder}: found No such file or directory. Name the folder that has them."
)
def no_folder(folder: Path) -> None:
    assert not folder.exists()


@_refused(NotFoundError, "no tensor in {folder}. Name the folder of the model's checkpoint.")
def no_tensors(folder: Path) -> None:
    _raw(folder, {}, b"")


@_refused(
    SourceError,
    "weights of two saves in {folder}: found model-00001-of-00002.safetensors, tmp-rank1.safetensors. Move those away "
    "that are not meant.",
)
def files_of_ranks_half_renamed(folder: Path) -> None:
    write(folder, {FIRST: {"a": FULL}, "tmp-rank1.safetensors": {"b": FULL}})


@_refused(
    SourceError,
    "missing tmp-rank1-00001-of-00002.safetensors in {folder}: expected 2 weight files, found 1. Copy the others here, "
    "or use another step.",
)
def half_of_the_files_of_a_rank(folder: Path) -> None:
    write(folder, {"tmp-rank0.safetensors": {"a": FULL}, "tmp-rank1-00002-of-00002.safetensors": {"b": FULL}})


@_refused(
    SourceError,
    "a tensor in several files that do not say which part of it they have for 'a' in {folder}: found "
    "weights_rank0.safetensors, weights_rank1.safetensors. Save with torch's HuggingFaceStorageWriter, or whole "
    "tensors.",
)
def local_tensors_of_ranks(folder: Path) -> None:
    write(folder, {f"weights_rank{rank}.safetensors": {"a": FULL[4 * rank :][:4]} for rank in range(2)})


def _shards(folder: Path, *blocks: tuple[torch.Tensor, list[int]]) -> None:
    for rank, block in enumerate(blocks):
        write_shard(folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", {"w": block})


@_refused(
    SourceError,
    "chunks that leave a hole for 'w' in {folder}: found no data for some of rows 2:4 of 8. The checkpoint is "
    "incomplete; use another step.",
)
def a_rank_without_its_shard(folder: Path) -> None:
    _shards(folder, *((FULL[row : row + 2], [row, 0]) for row in range(0, 8, 2)))
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()


@_refused(
    SourceError,
    "chunks that leave a hole for 'w' in {folder}: found no data for some of rows 4:8 of 8. The checkpoint is "
    "incomplete; use another step.",
)
def a_rank_without_its_block_of_a_grid(folder: Path) -> None:
    _shards(folder, (FULL[:4, :3], [0, 0]), (FULL[:4, 3:], [0, 3]), (FULL[4:, :3], [4, 0]))


@_refused(
    SourceError,
    "chunks that overlap for 'w' in {folder}: found [0:4, 0:5] in shard-00001-model-00001-of-00001.safetensors and "
    "[2:4, 0:5] in shard-00002-model-00001-of-00001.safetensors. The files are of different saves; use another step.",
)
def shards_of_two_saves(folder: Path) -> None:
    _shards(folder, *((FULL[row : row + 2], [row, 0]) for row in range(0, 8, 2)))
    _shards(folder, (FULL[:4], [0, 0]))


@_refused(
    SourceError,
    "chunks that overlap for 'w' in {folder}: found [] in shard-00001-model-00001-of-00001.safetensors and [] in "
    "shard-00002-model-00001-of-00001.safetensors. The files are of different saves; use another step.",
)
def a_scalar_of_two_saves(folder: Path) -> None:
    _shards(folder, (FULL[0, 0], []), (FULL[0, 1], []))


@_refused(
    SourceError,
    "shards of different tensors under one name for 'w' in {folder}: found [4, 5] torch.bfloat16 in "
    "shard-00002-model-00001-of-00001.safetensors, [4, 5] torch.float32 in "
    "shard-00001-model-00001-of-00001.safetensors. The files are of different saves; use another step.",
)
def shards_of_two_dtypes(folder: Path) -> None:
    _shards(folder, (FULL[:4], [0, 0]), (FULL[4:].bfloat16(), [4, 0]))


@_refused(
    SourceError,
    "shards of different tensors under one name for 'w' in {folder}: found [4, 5] torch.float32 in "
    "shard-00001-model-00001-of-00001.safetensors, [5] torch.float32 in "
    "shard-00002-model-00001-of-00001.safetensors. The files are of different saves; use another step.",
)
def shards_of_two_numbers_of_dims(folder: Path) -> None:
    _shards(folder, (FULL[:4], [0, 0]), (FULL[4], [4]))


@_refused(
    SourceError,
    "a damaged safetensors header for 'w' in {folder}/shard-00001-model-00001-of-00001.safetensors: found no "
    "saved_offsets of it in DCP_SHARDING_INFO. Copy the file here again, or use another step.",
)
def offsets_of_another_number_of_dims(folder: Path) -> None:
    _shards(folder, (FULL, [0]))


@_refused(
    SourceError,
    "a damaged safetensors header for 'w' in {folder}/shard-00001-model-00001-of-00001.safetensors: found no "
    "saved_offsets of it in DCP_SHARDING_INFO. Copy the file here again, or use another step.",
)
def offsets_beyond_any_tensor(folder: Path) -> None:
    _shards(folder, (FULL, [1 << 61, 0]))


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found DCP_SHARDING_INFO with Expecting value: line 1 "
    "column 1 (char 0). Copy the file here again, or use another step.",
)
def offsets_that_are_no_json(folder: Path) -> None:
    _raw(folder, {"__metadata__": {"DCP_SHARDING_INFO": "?"}, "a": _entry()})


@_refused(
    SourceError,
    "weights of two saves in {folder}: found model.safetensors, shard-00001-model-00001-of-00001.safetensors. Move "
    "those away that are not meant.",
)
def shards_beside_a_whole(folder: Path) -> None:
    _shards(folder, (FULL, [0, 0]))
    write(folder, {"model.safetensors": {"w": FULL}})


@_refused(
    SourceError,
    "a truncated safetensors file in {folder}/model.safetensors: expected 232 bytes, found 231. Copy the file here "
    "again, or use another step.",
)
def truncated_tensor(folder: Path) -> None:
    write(folder, {"model.safetensors": {"w": FULL}})
    os.truncate(folder / "model.safetensors", 231)


@_refused(
    SourceError,
    "a truncated safetensors file in {folder}/model.safetensors: expected at least 72 bytes, found 40. Copy the file "
    "here again, or use another step.",
)
def truncated_header(folder: Path) -> None:
    write(folder, {"model.safetensors": {"w": FULL}})
    os.truncate(folder / "model.safetensors", 40)


@_refused(
    SourceError,
    "a truncated safetensors file in {folder}/model.safetensors: expected at least 8 bytes, found 0. Copy the file "
    "here again, or use another step.",
)
def empty_file(folder: Path) -> None:
    write(folder, {"model.safetensors": {"w": FULL}})
    os.truncate(folder / "model.safetensors", 0)


@_refused(
    SourceError,
    "no safetensors header in {folder}/model.safetensors: expected at most 100,000,000 bytes, found a length of "
    "100,000,001. Copy the file here again, or use another step.",
)
def header_too_long(folder: Path) -> None:
    _raw(folder, {"a": _entry()}, length=100_000_001)
    os.truncate(folder / "model.safetensors", 100_000_009)


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found no { at its begin. Copy the file here again, or "
    "use another step.",
)
def header_that_is_no_table(folder: Path) -> None:
    _raw(folder, [1, 2])


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found Expecting property name enclosed in double "
    "quotes: line 1 column 2 (char 1). Copy the file here again, or use another step.",
)
def header_that_is_no_json(folder: Path) -> None:
    _raw(folder, b"{]")


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found NaN, which is no number of JSON. Copy the file "
    "here again, or use another step.",
)
def header_with_no_number(folder: Path) -> None:
    _raw(folder, {"a": _entry(shape=[float("nan")])})


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found values nested too deeply. Copy the file here "
    "again, or use another step.",
)
def header_without_a_bottom(folder: Path) -> None:
    _raw(folder, b'{"a":' + b"[" * 100_000)


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found a key that stands twice. Copy the file here "
    "again, or use another step.",
)
def header_with_a_tensor_twice(folder: Path) -> None:
    entry = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    _raw(folder, b'{"a":' + entry + b',"a":' + entry + b"}")


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found a name that is no text. Copy the file here "
    "again, or use another step.",
)
def name_that_is_no_text(folder: Path) -> None:
    _raw(folder, {"\udcff": _entry()})


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found __metadata__ that is no table of texts. Copy "
    "the file here again, or use another step.",
)
def metadata_with_numbers(folder: Path) -> None:
    _raw(folder, {"__metadata__": {"step": 3}, "a": _entry()})


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found no dtype, shape and data_offsets. Copy "
    "the file here again, or use another step.",
)
def tensor_without_a_shape(folder: Path) -> None:
    _raw(folder, {"a": {"dtype": "F32", "data_offsets": [0, 8]}})


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found a shape or data_offsets that are no "
    "counts. Copy the file here again, or use another step.",
)
def negative_shape(folder: Path) -> None:
    _raw(folder, {"a": _entry(shape=[-2, -1])})


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found a shape or data_offsets that are no "
    "counts. Copy the file here again, or use another step.",
)
def broken_shape(folder: Path) -> None:
    _raw(folder, {"a": _entry(shape=[2.0])})


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found a shape larger than any tensor. Copy "
    "the file here again, or use another step.",
)
def boundless_shape(folder: Path) -> None:
    _raw(folder, {"a": _entry(shape=[0, 1 << 59], offsets=[0, 0])})


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found data_offsets [0, 8] of a tensor of 12 "
    "bytes. Copy the file here again, or use another step.",
)
def too_few_bytes(folder: Path) -> None:
    _raw(folder, {"a": _entry(shape=[3])})


@_refused(
    SourceError,
    "a damaged safetensors header for 'b' in {folder}/model.safetensors: found 4 bytes that 'a' has, too. Copy the "
    "file here again, or use another step.",
)
def overlapping_tensors(folder: Path) -> None:
    _raw(folder, {"a": _entry(), "b": _entry(offsets=[4, 12])}, bytes(12))


@_refused(
    SourceError,
    "a damaged safetensors header for 'b' in {folder}/model.safetensors: found 4 bytes before it that no tensor has. "
    "Copy the file here again, or use another step.",
)
def gap_between_tensors(folder: Path) -> None:
    _raw(folder, {"a": _entry(), "b": _entry(offsets=[12, 20])}, bytes(20))


@_refused(
    SourceError,
    "a damaged safetensors header in {folder}/model.safetensors: found 2 bytes at the end that no tensor has. Copy the "
    "file here again, or use another step.",
)
def trailing_bytes(folder: Path) -> None:
    _raw(folder, {"a": _entry()}, bytes(10))


@_refused(
    SourceError,
    "a dtype that this torch does not have for 'a' in {folder}/model.safetensors: found 'F6_E3M2'. Update torch.",
)
def dtype_that_torch_lacks(folder: Path) -> None:
    _raw(folder, {"a": _entry(dtype="F6_E3M2", shape=[4], offsets=[0, 3])}, bytes(3))


@_refused(
    SourceError,
    "a damaged safetensors header for 'a' in {folder}/model.safetensors: found an odd number of F4 in a row. Copy the "
    "file here again, or use another step.",
)
def half_a_byte(folder: Path) -> None:
    _raw(folder, {"a": _entry(dtype="F4", shape=[2, 3], offsets=[0, 3])}, bytes(3))


@_refused(
    SourceError,
    "a shard that does not say which part of its tensors it has in "
    "{folder}/shard-00001-model-00001-of-00001.safetensors. Save with torch's HuggingFaceStorageWriter, or whole "
    "tensors.",
)
def shard_that_does_not_say_of_what(folder: Path) -> None:
    write(folder, {"shard-00001-model-00001-of-00001.safetensors": {"w": FULL[:4]}})


@_refused(
    SourceError,
    "weights of two saves in {folder}: found renamed.safetensors, "
    "shard-00001-model-00001-of-00001.safetensors. Move those away that are not meant.",
)
def shard_that_was_renamed(folder: Path) -> None:
    _shards(folder, (FULL[:4], [0, 0]), (FULL[4:], [4, 0]))
    second = folder / "shard-00002-model-00001-of-00001.safetensors"
    second.rename(folder / "renamed.safetensors")


@_refused(
    SourceError,
    "a data file that cannot be read in {folder}/shard-00002-model-00001-of-00001.safetensors: found Is a directory",
)
def folder_in_the_place_of_a_shard(folder: Path) -> None:
    _shards(folder, (FULL[:4], [0, 0]))
    (folder / "shard-00002-model-00001-of-00001.safetensors").mkdir()


@_refused(
    SourceError, "one of 999,999 files, which are more than can be, in {folder}/model-00001-of-999999.safetensors"
)
def one_of_very_many_files(folder: Path) -> None:
    write(folder, {"model-00001-of-999999.safetensors": {"w": FULL}})


@_refused(
    SourceError,
    f"missing {'x' * 300}.safetensors in {{folder}}: expected 1 weight files, found 0. Copy the others here, or use "
    "another step.",
)
def name_that_no_file_can_have(folder: Path) -> None:
    write(folder, {}, index={"w": "x" * 300 + ".safetensors"})
