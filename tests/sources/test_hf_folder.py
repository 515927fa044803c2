import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_folders import save
from hf_folders import INDEX, write, write_index, write_raw, write_shard
from models import hf_model, meshes_for, shard, tiny
from ranks import run_ranks
from refused.hf_folder import REFUSED, Maker
from safetensors.torch import load_file, save_file
from stored_sources import assert_equal, assert_holds
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fsdp_export.errors import ExportError, NotFoundError, SourceError, UsageError
from fsdp_export.sources.base import Source
from fsdp_export.sources.hf_folder import HfFolderSource

FULL = torch.arange(40.0).view(8, 5)
SHARD = "shard-{:05}-model-00001-of-00001.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def read_all(folder: Path) -> None:
    source = HfFolderSource(folder)
    for spec in source.specs:
        assert source.rows(spec, 0, spec.num_rows).shape == spec.shape


def in_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sort by names, which have no numbers above 9."""
    return dict(sorted(tensors.items()))


def mapping(state_dict: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: 1 + index % 2 for index, name in enumerate(state_dict)}


def save_shards(folder: Path, layout: str) -> None:
    state_dict = shard(tiny(tied=False), layout, dist.get_world_size()).state_dict()
    for name, files in (("one", None), ("two", mapping(state_dict))):
        writer = HuggingFaceStorageWriter(str(folder / name), fqn_to_index_mapping=files, save_distributed=True)
        save(folder / name, state_dict, storage_writer=writer)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(size, layout) for size in (2, 4) for layout in meshes_for(size)], ids=str
)
def test_shards_of_torchs_writer_are_the_unsharded_state_dict(world_size: int, layout: str, tmp_path: Path) -> None:
    run_ranks(save_shards, world_size, tmp_path, layout)
    expected = tiny(tied=False).state_dict()
    for name, files_of_a_rank in (("one", 1), ("two", 2)):
        source = HfFolderSource(tmp_path / name)
        assert_holds(source, in_order(expected))
        assert source.description.startswith("shards of torch's Hugging Face writer, ")
        assert len(list((tmp_path / name).iterdir())) == world_size * files_of_a_rank


class Floats(nn.Module):
    """What torch can put together: no integers, nothing without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)


def put_together(folder: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Save with torch, which in the end puts the shards together."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state_dict), storage_writer=writer)


def save_floats(folder: Path) -> None:
    state_dict = shard(Floats(), "1d", dist.get_world_size()).state_dict()
    put_together(folder, state_dict)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch's writer leaves with `enable_consolidation=True`: the model, and its shards in `sharded/`."""
    folder = tmp_path_factory.mktemp("torch") / "ckpt"
    run_ranks(save_floats, 2, folder)
    return folder


@pytest.fixture(params=["torch", "automodel"])
def two_forms(request: pytest.FixtureRequest, floats: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder to name, that of what is put together in it, and that of the shards."""
    folder = shutil.copytree(floats, tmp_path / "ckpt")
    if request.param == "torch":
        return folder, folder, folder / "sharded"
    (folder / "sharded").rename(tmp_path / "model")
    folder.rename(tmp_path / "model" / "consolidated")
    return tmp_path / "model", tmp_path / "model" / "consolidated", tmp_path / "model"


EXPECTED = in_order(Floats().state_dict())


def test_what_is_put_together_is_preferred(two_forms: tuple[Path, Path, Path]) -> None:
    folder, whole, shards = two_forms
    source = HfFolderSource(folder)
    assert_holds(source, EXPECTED)
    assert source.folder == whole
    assert source.description == "Hugging Face folder, 1 file, 3 tensors, 308 B, float32"
    shutil.rmtree(shards if shards != folder else whole)
    assert_holds(HfFolderSource(folder), EXPECTED)


def rename_tensors(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = {f"x.{key}": value for key, value in json.loads(data[8 : 8 + length]).items()}
    write_raw(file, header, data[8 + length :])


def rename_tensors_without_an_index(file: Path) -> None:
    rename_tensors(file)
    (file.parent / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "a truncated safetensors file in "),
        (rename_tensors, "tensors that the index lists and its files do not have in "),
        (rename_tensors_without_an_index, "other names, shapes or dtypes than in the shards"),
    ],
    ids=["truncated", "of another save", "of another save without an index"],
)
def test_shards_are_read_where_what_is_put_together_is_not_the_same(
    two_forms: tuple[Path, Path, Path], damage: Any, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole, shards = two_forms
    damage(whole / "model-00001-of-00001.safetensors")
    source = HfFolderSource(folder)
    assert_holds(source, EXPECTED)
    assert source.folder == shards
    (message,) = caplog.messages
    assert message.startswith(f"shards are read, for what is put together of them in {whole} has: {found}")


def test_of_two_saves_neither_is_taken(two_forms: tuple[Path, Path, Path]) -> None:
    folder, whole, shards = two_forms
    file = whole / "model-00001-of-00001.safetensors"
    name = next(name for name, tensor in EXPECTED.items() if tensor.dim())
    save_file({key: tensor + (key == name) for key, tensor in load_file(file).items()}, file)
    with pytest.raises(UsageError) as caught:
        HfFolderSource(folder)
    assert str(caught.value) == (
        f"weights that are not those of the shards beside them for {name!r} in {whole}: found other values than in "
        f"{shards}. One of the two is of another save: move away what is not meant."
    )


def test_what_is_put_together_is_read_where_shards_are_missing(
    two_forms: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole, shards = two_forms
    os.truncate(shards / SHARD.format(1), 9)
    source = HfFolderSource(folder)
    assert_holds(source, EXPECTED)
    assert source.folder == whole
    assert caplog.messages[0].startswith(f"shards are left alone for what is put together in {whole}: a truncated")


def save_a_scalar(folder: Path) -> None:
    put_together(folder, {"scale": torch.tensor(2.5)})


def test_a_scalar_that_torch_puts_together_as_zero_is_read_from_its_shard(tmp_path: Path) -> None:
    run_ranks(save_a_scalar, 2, tmp_path)
    assert load_file(tmp_path / "model-00001-of-00001.safetensors")["scale"] == 0
    assert_holds(HfFolderSource(tmp_path), {"scale": torch.tensor(2.5)})


@pytest.mark.parametrize("max_shard_size", ["5GB", "3KB"])
def test_what_save_pretrained_wrote_is_read(max_shard_size: str, tmp_path: Path) -> None:
    model: Any = hf_model("qwen2")
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    source = HfFolderSource(tmp_path)
    assert_holds(source, in_order(model.state_dict()))
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert (num_files > 1) == (max_shard_size == "3KB") == (tmp_path / INDEX).exists()
    assert f"Hugging Face folder, {num_files} file" in source.description


@pytest.mark.parametrize(
    "pattern", ["model-0000{}-of-00002.safetensors", "model.safetensors-0000{}-of-00002.safetensors"]
)
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_whole_tensors_in_numbered_files_are_read(pattern: str, index: bool, tmp_path: Path) -> None:
    tensors = {"a.2.w": FULL, "a.10.w": FULL + 1, "b": FULL[0, 0], "c": FULL[:0]}
    files = {pattern.format(1): {"b": tensors["b"], "a.10.w": tensors["a.10.w"]}}
    files[pattern.format(2)] = {key: tensors[key] for key in ("c", "a.2.w")}
    write(tmp_path, files, index=index)
    assert_holds(HfFolderSource(tmp_path), tensors)


@pytest.mark.parametrize(
    "others",
    [["consolidated.safetensors"], ["consolidated-00001-of-00003.safetensors"], ["adapter_model.safetensors"]],
    ids=lambda names: names[0],
)
def test_other_weights_beside_the_model_are_left_alone(others: Sequence[str], tmp_path: Path) -> None:
    for index in (False, True):
        files = {FIRST: {"a": FULL}, SECOND: {"b": FULL}} if index else {"model.safetensors": {"a": FULL, "b": FULL}}
        folder = write(tmp_path / str(index), files, index=index)
        write(folder, {name: {"a": FULL + 1} for name in others})
        assert_holds(HfFolderSource(folder), {"a": FULL, "b": FULL})


def test_a_file_of_another_name_is_read_where_it_is_the_only_one(tmp_path: Path) -> None:
    write(tmp_path, {"diffusion_pytorch_model.safetensors": {"a": FULL}})
    assert_holds(HfFolderSource(tmp_path), {"a": FULL})


def test_a_file_or_an_index_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, {"text.safetensors": {"a": FULL}, "vision.safetensors": {"b": FULL}})
    write_index(tmp_path, {"b": "vision.safetensors"}, "other.safetensors.index.json")
    source = HfFolderSource(tmp_path / "text.safetensors")
    assert_holds(source, {"a": FULL})
    assert source.description == "safetensors file, 1 file, 1 tensor, 160 B, float32"
    assert_holds(HfFolderSource(tmp_path / "other.safetensors.index.json"), {"b": FULL})
    write(tmp_path, {"adapter_model.safetensors": {"c": FULL}})
    assert_holds(HfFolderSource(tmp_path / "adapter_model.safetensors"), {"c": FULL})


@pytest.mark.parametrize("name", [FIRST, SHARD.format(2), "tmp-rank1.safetensors"])
def test_a_file_that_is_a_part_stands_for_its_folder(name: str, tmp_path: Path) -> None:
    if name.startswith("shard"):
        for rank in range(2):
            write_shard(tmp_path / SHARD.format(rank + 1), {"w": (FULL[4 * rank :][:4], [4 * rank, 0])})
        assert_holds(HfFolderSource(tmp_path / name), {"w": FULL})
    else:
        write(tmp_path, {name: {"a": FULL}, name.replace("1", "2", 1).replace("0000", "0000"): {"b": FULL}})
        assert [spec.name for spec in HfFolderSource(tmp_path / name).specs] == ["a", "b"]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
        *(torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.complex64),
    ],
    ids=str,
)
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4, 16), dtype=torch.uint8, generator=draw)
    tensors = {"empty": raw.view(dtype)[:0], "matrix": raw.view(dtype)}
    if dtype is not torch.float4_e2m1fn_x2:
        tensors["scalar"] = raw.view(dtype)[0, 0, 0]
    write(tmp_path, {"model.safetensors": tensors})
    assert_holds(HfFolderSource(tmp_path), tensors)


def test_shards_without_rows_do_not_stretch_a_tensor(tmp_path: Path) -> None:
    two_rows = FULL[:2]
    for rank, (first, stop) in enumerate([(0, 1), (1, 2), (2, 2), (2, 2)]):
        blocks = {"w": (two_rows[first:stop], [first, 0]), "empty": (FULL[:0], [0, 0])}
        if first == stop:
            blocks["w"] = (two_rows[:0], [3, 0])
        write_shard(tmp_path / SHARD.format(rank + 1), blocks)
    assert_holds(HfFolderSource(tmp_path), {"empty": FULL[:0], "w": two_rows})


@pytest.mark.parametrize("wrapper", ["", "model.", "app.model."])
def test_what_wraps_the_model_in_shards_is_found(wrapper: str, tmp_path: Path) -> None:
    names = ["lm_head.weight", "model._orig_mod.norm.weight"]
    blocks = {f"{wrapper}{name}": (FULL, [0, 0]) for name in names} | {"optim.state.w.exp_avg": (FULL, [0, 0])}
    write_shard(tmp_path / SHARD.format(1), blocks)
    source = HfFolderSource(tmp_path)
    assert_holds(source, {"lm_head.weight": FULL, "model.norm.weight": FULL})
    assert source.skipped == ("optim.state.w.exp_avg",)
    below = f"below {wrapper.rstrip('.')!r}, " if wrapper else ""
    assert source.description.endswith(f"float32, {below}1 other entry left out")


def test_names_on_the_hub_are_left_as_they_are(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": FULL, "model.optim.weight": FULL, "scheduler.w": FULL}
    write(tmp_path / "whole", {"model.safetensors": tensors})
    assert_holds(HfFolderSource(tmp_path / "whole"), tensors)
    write_shard(tmp_path / "sharded" / SHARD.format(1), {"model.embed_tokens.weight": (FULL, [0, 0])})
    assert [spec.name for spec in HfFolderSource(tmp_path / "sharded").specs] == ["model.embed_tokens.weight"]


def test_a_given_prefix_counts(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"text.w": FULL, "text.v": FULL, "vision.w": FULL}})
    source = HfFolderSource(tmp_path, prefix="text")
    assert_holds(source, {"v": FULL, "w": FULL})
    assert source.skipped == ("vision.w",)
    with pytest.raises(NotFoundError, match=r"no tensor of a model below 'audio\.'"):
        HfFolderSource(tmp_path, prefix="audio")


def test_files_of_ranks_with_whole_tensors_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["tmp-rank0.safetensors", *(f"tmp-rank1-0000{part}-of-00002.safetensors" for part in (1, 2))]
    write(tmp_path, {name: {f"w{index}": FULL + index} for index, name in enumerate(names)})
    with caplog.at_level(logging.WARNING, "fsdp_export"):
        source = HfFolderSource(tmp_path)
    assert_holds(source, {f"w{index}": FULL + index for index in range(3)})
    assert source.description == "files of ranks that hold whole tensors, 3 files, 3 tensors, 480 B, float32"
    assert caplog.messages == [f"{tmp_path}: a save that did not finish; what other ranks had to write may be missing"]


def test_only_headers_and_the_wanted_rows_are_read(reads: list[int], tmp_path: Path) -> None:
    full = torch.randn(1000, 256)
    for rank in range(2):
        write_shard(tmp_path / SHARD.format(rank + 1), {"w": (full[500 * rank :][:500], [500 * rank, 0])})
    source = HfFolderSource(tmp_path)
    assert sum(reads) < 2 * 300
    reads.clear()
    assert_equal(source.rows(source.specs[0], 490, 510), full[490:510])
    assert reads == [10 * 256 * 4] * 2
    source.close()
    assert_equal(source.rows(source.specs[0], 3, 4), full[3:4])


def test_a_file_that_goes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": FULL}})
    source = HfFolderSource(tmp_path)
    source.close()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SourceError) as caught:
        source.rows(source.specs[0], 0, 8)
    file = tmp_path / "model.safetensors"
    assert str(caught.value) == f"a data file that cannot be read in {file}: found No such file or directory"


def test_it_is_a_source_all_of_which_every_rank_has(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"w": FULL}})
    source: Source = HfFolderSource(tmp_path, ranks=(0, 1, 2), rank=2, device=torch.device("meta"))
    assert (source.ranks, source.rank, source.device, source.folder) == ((0, 1, 2), 2, torch.device("meta"), tmp_path)
    (spec,) = source.specs
    assert [ranks for _, ranks in spec.sharding.holders(spec.shape)] == [(0, 1, 2)]
    assert (source.copies, source.groups) == ((), {})


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED])
def test_what_cannot_be_read_is_refused(make: Maker, error: type[ExportError], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    make(folder)
    with pytest.raises(ExportError) as caught:
        read_all(folder)
    assert str(caught.value).replace(str(folder), "{folder}") == message
    assert type(caught.value) is error


@pytest.mark.parametrize("file", [INDEX, FIRST, SHARD.format(1)])
def test_damaged_bytes_give_our_errors_or_values_of_the_right_shape(file: str, tmp_path: Path) -> None:
    intact = tmp_path / "intact"
    if file.startswith("shard"):
        for rank in range(2):
            blocks = {"n": (FULL[0, rank : rank + 1].bfloat16(), [rank]), "w": (FULL[4 * rank :][:4], [4 * rank, 0])}
            write_shard(intact / SHARD.format(rank + 1), blocks)
    else:
        write(intact, {FIRST: {"a": FULL, "n": FULL[0].bfloat16()}, SECOND: {"b": FULL[0, 0]}}, index=True)
    data = (intact / file).read_bytes()
    draw = random.Random(0)
    for turn in range(200):
        folder = shutil.copytree(intact, tmp_path / f"{turn}")
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 8])):
            damaged[draw.randrange(min(len(data), 300))] ^= draw.randint(1, 255)
        (folder / file).write_bytes(damaged[: draw.randrange(len(data))] if draw.random() < 0.1 else damaged)
        try:
            read_all(folder)
        except ExportError:
            continue
        finally:
            shutil.rmtree(folder)
