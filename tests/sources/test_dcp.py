import gc
import importlib
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from dcp_folders import Block, edit_metadata, put_together, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import meshes_for, shard, tiny
from ranks import run_ranks
from refused.dcp import REFUSED, Maker
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import StateDictType

from fsdp_export.errors import ExportError, NotFoundError, SourceError
from fsdp_export.sources import archive
from fsdp_export.sources.base import Source
from fsdp_export.sources.dcp import DcpSource

FULL = torch.arange(40.0).view(8, 5)
NAMELESS = _StorageInfo(cast("str", 3), 1, 3)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_equal(read: torch.Tensor, expected: torch.Tensor) -> None:
    assert (read.dtype, read.shape, read.device) == (expected.dtype, expected.shape, expected.device)
    assert torch.equal(as_bytes(read), as_bytes(expected))


def assert_holds(source: DcpSource, expected: Mapping[str, torch.Tensor], *, num_slices: int = 3) -> None:
    """Compare names, order, and every tensor as a whole and in random rows."""
    assert [spec.name for spec in source.specs] == list(expected)
    draw = random.Random(0)
    for spec in source.specs:
        full = expected[spec.name]
        assert (spec.shape, spec.dtype) == (tuple(full.shape), full.dtype)
        assert_equal(source.rows(spec, 0, spec.num_rows), full)
        for _ in range(num_slices if full.dim() else 0):
            first, stop = sorted(draw.randint(0, spec.num_rows) for _ in range(2))
            assert_equal(source.rows(spec, first, stop), full[first:stop])


def read_all(folder: Path) -> None:
    source = DcpSource(folder)
    for spec in source.specs:
        assert source.rows(spec, 0, spec.num_rows).shape == spec.shape


def save_sharded(folder: Path, layout: str) -> None:
    model = shard(tiny(), layout, dist.get_world_size())
    save(folder, {"model": model.state_dict(), "step": 3})


@pytest.mark.parametrize(
    ("world_size", "layout"), [(size, layout) for size in (1, 2, 4) for layout in meshes_for(size)], ids=str
)
def test_what_ranks_saved_is_the_unsharded_state_dict(world_size: int, layout: str, tmp_path: Path) -> None:
    run_ranks(save_sharded, world_size, tmp_path, layout)
    source = DcpSource(tmp_path)
    assert_holds(source, tiny().state_dict())
    assert source.skipped == ("step",)
    assert len(list(tmp_path.glob("*.distcp"))) == world_size


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float4_e2m1fn_x2,
        torch.int64,
        torch.int8,
        torch.uint16,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4, 16), dtype=torch.uint8, generator=draw)
    tensor = raw.view(dtype)
    state_dict = {"matrix": tensor, "scalar": tensor[0, 0, 0], "empty": tensor.new_empty(0, 5)}
    assert_holds(DcpSource(save(tmp_path, state_dict)), state_dict)


def tilings(shape: Sequence[int]) -> st.SearchStrategy[list[Block]]:
    """Cut a block again and again, anywhere, in any dim."""

    @st.composite
    def cut(draw: st.DrawFn) -> list[Block]:
        blocks: list[Block] = [tuple(slice(0, size) for size in shape)]
        for _ in range(draw(st.integers(0, 5))):
            block = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(block[dim].start, block[dim].stop))
            halves = slice(block[dim].start, at), slice(at, block[dim].stop)
            # Blocks without elements share their start with others; a save keeps no two of the same start.
            blocks += [(*block[:dim], half, *block[dim + 1 :]) for half in halves if half.start < half.stop]
        return blocks

    return cut()


STORED_AS = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": lambda block: block.transpose(0, -1).contiguous().transpose(0, -1),
    "rotated": lambda block: block.movedim(0, -1).contiguous().movedim(-1, 0),
    "view": lambda block: torch.cat([block, block, block], -1)[..., block.shape[-1] : 2 * block.shape[-1]],
    "parameter": lambda block: torch.nn.Parameter(block.clone()),
    "every other": lambda block: block.repeat_interleave(2, dim=-1)[..., ::2],
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_are_put_together_from_any_tiling(data: st.DataObject, tmp_path: Path) -> None:
    shape = data.draw(st.sampled_from([(7,), (5, 6), (4, 3, 5)]))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    blocks = data.draw(tilings(shape))
    stored_as = STORED_AS[data.draw(st.sampled_from(sorted(STORED_AS)))]
    folder = tmp_path / "ckpt"
    shutil.rmtree(folder, ignore_errors=True)
    put_together(folder, {"w": full}, lambda _: blocks, num_files=data.draw(st.integers(1, 3)), stored_as=stored_as)
    source = DcpSource(folder)
    first = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(first, shape[0]))
    assert_equal(source.rows(source.specs[0], first, stop), full[first:stop])
    source.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of data files."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        sizes.append(preadv(descriptor, targets, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize(
    "stored_as", [STORED_AS["contiguous"], STORED_AS["transposed"]], ids=["straight", "transposed"]
)
def test_only_the_wanted_rows_are_read(stored_as: Any, reads: list[int], tmp_path: Path) -> None:
    full = torch.randn(1000, 256)
    halves = [(slice(0, 500), slice(0, 256)), (slice(500, 1000), slice(0, 256))]
    source = DcpSource(put_together(tmp_path, {"w": full}, lambda _: halves, stored_as=stored_as))
    assert sum(reads) < 2000
    reads.clear()
    assert_equal(source.rows(source.specs[0], 490, 510), full[490:510])
    assert sum(reads) < 20 * 256 * 4 + 2000
    reads.clear()
    source.rows(source.specs[0], 10, 13)
    assert sum(reads) == 3 * 256 * 4


def test_a_read_that_comes_short_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = DcpSource(put_together(tmp_path, {"w": FULL}))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, offset: preadv(file, [targets[0][:7]], offset))
    assert_equal(source.rows(source.specs[0], 0, 8), FULL)


def open_files(folder: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and folder in link.readlink().parents for link in links)


def test_files_are_opened_when_needed_and_few_stay_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "_MAX_OPEN", 3)
    state_dict = {f"w{index}": FULL + index for index in range(8)}
    source = DcpSource(put_together(tmp_path, state_dict, num_files=8))
    assert open_files(tmp_path) == 1
    assert_holds(source, state_dict)
    assert open_files(tmp_path) == 3
    source.close()
    assert open_files(tmp_path) == 0
    assert_holds(source, state_dict)
    del source
    gc.collect()
    assert open_files(tmp_path) == 0


def test_it_is_a_source_all_of_which_every_rank_has(tmp_path: Path) -> None:
    put_together(tmp_path, {"w": FULL})
    source: Source = DcpSource(tmp_path, ranks=(0, 1, 2), rank=2, device=torch.device("meta"))
    assert (source.ranks, source.rank, source.device, source.folder) == ((0, 1, 2), 2, torch.device("meta"), tmp_path)
    (spec,) = source.specs
    assert spec.sharding.is_replicated
    assert [ranks for _, ranks in spec.sharding.holders(spec.shape)] == [(0, 1, 2)]
    assert not spec.is_buffer
    assert (source.copies, source.groups) == ((), {})
    source.refresh()
    assert DcpSource(tmp_path).device == torch.device("cpu")


def test_the_description_says_what_was_found_and_what_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": FULL.bfloat16(), "n": FULL[0]}, "optim": {"w": {"exp_avg": FULL}}, "step": 3})
    source = DcpSource(tmp_path)
    assert source.description == (
        "DCP checkpoint, 1 data file, 2 tensors, 100 B, bfloat16 and float32, below 'model', 2 other entries left out"
    )
    assert source.skipped == ("optim.w.exp_avg", "step")


class App(Stateful):
    """What the tutorial of DCP saves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randint(0, 11, (2, 3))).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda app: app.model.state_dict(), ""),
        (lambda app: app.state_dict(), "model."),
        (lambda app: {"app": app}, "app.model."),
        (
            lambda app: {"state": {"model": app.model.state_dict(), "optimizers": app.state_dict()["optim"]}},
            "state.model.",
        ),
        (lambda app: {**app.model.state_dict(), "optimizer": app.state_dict()["optim"], "step": 3}, ""),
        (lambda app: {"model": {f"module.{k}": v for k, v in app.model.state_dict().items()}}, "model."),
        (lambda app: {"model": {f"_orig_mod.{k}": v for k, v in app.model.state_dict().items()}}, "model."),
        (lambda app: {"policy": app.model.state_dict(), "train_state": {"step": torch.tensor(3)}}, "policy."),
        (lambda app: {"model": app.model.state_dict(), "ema": app.model.state_dict()}, "model."),
    ],
    ids=["flat", "nested", "stateful", "composer", "torchtitan", "ddp", "compiled", "other word", "ema"],
)
def test_the_model_is_found_and_nothing_else(wrap: Any, prefix: str, tmp_path: Path) -> None:
    app = App(tiny())
    source = DcpSource(save(tmp_path, wrap(app)))
    assert_holds(source, app.model.state_dict(), num_slices=0)
    assert (f"below {prefix.rstrip('.')!r}" in source.description) == bool(prefix)


LLAMA = {"model.embed_tokens.weight": FULL, "model.norm.weight": FULL[0]}
HEAD = {"lm_head.weight": FULL}


@pytest.mark.parametrize(
    ("state_dict", "names"),
    [
        (LLAMA, LLAMA),
        (LLAMA | HEAD, LLAMA | HEAD),
        ({"model": LLAMA}, LLAMA),
        ({"model": LLAMA | HEAD}, LLAMA | HEAD),
        ({"model": {"model": LLAMA}}, LLAMA),
        (LLAMA | {"optimizer": {"state": {"model.norm.weight": {"exp_avg": FULL}}}}, LLAMA),
    ],
    ids=["tied", "untied", "wrapped tied", "wrapped untied", "wrapped twice", "torchtitan tied"],
)
def test_names_that_begin_with_model_are_told_from_a_wrapper(
    state_dict: dict[str, Any], names: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert [spec.name for spec in DcpSource(save(tmp_path, state_dict)).specs] == list(names)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["model.model.norm.weight", "model.lm_head.weight"], ["model.norm.weight", "lm_head.weight"]),
        (["model.norm.weight", "lm_head.weight"], ["model.norm.weight", "lm_head.weight"]),
        (["layers.0.weight", "norm.weight"], ["layers.0.weight", "norm.weight"]),
        (["app.model.norm.weight", "app.optim.state.norm.weight.exp_avg"], ["norm.weight"]),
        (["state.model.norm.weight", "state.optimizers.AdamW.state.x", "epoch"], ["norm.weight"]),
        (["model.model.norm.weight", "optimizer.state.0.exp_avg", "lr_scheduler.last", "step"], ["model.norm.weight"]),
        (["module.norm.weight"], ["norm.weight"]),
        (["state_dict.norm.weight", "rng.cuda"], ["norm.weight"]),
    ],
    ids=["wrapped", "head", "flat", "app", "state", "optimizer", "ddp", "state dict"],
)
def test_without_a_record_of_nesting_the_names_tell(keys: list[str], names: list[str], tmp_path: Path) -> None:
    put_together(tmp_path, dict.fromkeys(keys, FULL))
    edit_metadata(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    source = DcpSource(tmp_path)
    assert [spec.name for spec in source.specs] == names
    assert len(source.skipped) == len(keys) - len(names)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("actor.", ["w", "module.v"]),
        ("actor", ["w", "module.v"]),
        ("actor.module", ["v"]),
        ("", ["actor.w", "actor.module.v", "critic.w"]),
    ],
    ids=repr,
)
def test_a_given_prefix_counts(prefix: str, names: list[str], tmp_path: Path) -> None:
    save(tmp_path, {"actor": {"w": FULL, "module.v": FULL}, "critic": {"w": FULL}, "optim": {"w": {"exp_avg": FULL}}})
    assert [spec.name for spec in DcpSource(tmp_path, prefix=prefix).specs] == names


@pytest.mark.parametrize("prefix", ["mode.", "optim."])
def test_a_prefix_without_tensors_is_refused(prefix: str, tmp_path: Path) -> None:
    save(tmp_path, {"actor": {"w": FULL}, "critic": {"w": FULL}, "optim": {"w": {"exp_avg": FULL}}})
    with pytest.raises(NotFoundError) as caught:
        DcpSource(tmp_path, prefix=prefix)
    assert str(caught.value) == (
        f"no tensor of a model below {prefix!r} in {tmp_path}: found 'actor.', 'critic.'."
        " Leave --prefix out, or give one of these."
    )


def save_with_accelerate(folder: Path) -> None:
    accelerate = importlib.import_module("accelerate")
    model = shard(tiny(), "1d", dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    plugin = SimpleNamespace(
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        fsdp_version=2,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=None,
    )
    accelerator = SimpleNamespace(num_processes=2, process_index=dist.get_rank(), wait_for_everyone=lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate.PartialState(cpu=True)
        accelerate.utils.save_fsdp_model(plugin, accelerator, model, folder)
        accelerate.utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def test_what_accelerate_saved_is_read(tmp_path: Path) -> None:
    run_ranks(save_with_accelerate, 2, tmp_path)
    expected = tiny()
    optimizer = torch.optim.SGD(expected.parameters(), momentum=0.9)
    expected(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    source = DcpSource(tmp_path / "pytorch_model_fsdp_0")
    assert_holds(source, expected.state_dict())
    with pytest.raises(NotFoundError, match="only optimizer and other state"):
        DcpSource(tmp_path / "optimizer_0")


def test_metadata_of_torch_before_2_3_are_read(tmp_path: Path) -> None:
    put_together(tmp_path, {"w": FULL})
    file = tmp_path / ".metadata"
    old = pickle.dumps(pickle.loads(file.read_bytes()), 2)
    new, sharded = b"ctorch.distributed.checkpoint.metadata\n", b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    old = old.replace(new + b"TensorProperties\n", sharded + b"TensorProperties\n")
    old = old.replace(new + b"_MEM_FORMAT_ENCODING\n", sharded + b"MEM_FORMAT_ENCODING\n")
    assert sharded in old
    file.write_bytes(old)
    assert_holds(DcpSource(tmp_path), {"w": FULL})


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED])
def test_what_cannot_be_read_is_refused(make: Maker, error: type[ExportError], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    make(folder)
    with pytest.raises(ExportError) as caught:
        read_all(folder)
    assert str(caught.value).replace(str(folder), "{folder}") == message
    assert type(caught.value) is error
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda metadata: setattr(metadata, "state_dict_metadata", None), "no tensors"),
        (lambda metadata: setattr(metadata, "storage_data", {}), "no data file of the chunk at (0, 0)"),
        (lambda metadata: metadata.state_dict_metadata.update(w=3), "an entry without a name"),
        (lambda metadata: metadata.storage_data.update({"w": 3}), "no MetadataIndex"),
        (
            lambda metadata: metadata.storage_data.update({MetadataIndex("w"): _StorageInfo("f", -1, 3)}),
            "a place without",
        ),
        (lambda metadata: metadata.storage_data.update({MetadataIndex("w"): NAMELESS}), "a place without a name"),
        (lambda metadata: setattr(metadata.state_dict_metadata["w"], "properties", None), "no dtype"),
        (lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", 3), "no dtype"),
        (lambda metadata: setattr(metadata.state_dict_metadata["w"], "chunks", None), "no chunks"),
        (lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", (8, -5)), "a size that is none"),
        (
            lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", (40,)),
            "a chunk of 2 dims of a tensor of 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_that_make_no_sense_are_refused(edit: Any, found: str, tmp_path: Path) -> None:
    put_together(tmp_path, {"w": FULL})
    edit_metadata(tmp_path, edit)
    with pytest.raises(SourceError, match=f"metadata that make no sense.*: found {re.escape(found)}"):
        DcpSource(tmp_path)


def test_the_same_chunk_listed_twice_is_one(tmp_path: Path) -> None:
    put_together(tmp_path, {"w": FULL})
    edit_metadata(
        tmp_path,
        lambda metadata: metadata.state_dict_metadata["w"].chunks.append(
            ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((8, 5)))
        ),
    )
    assert_holds(DcpSource(tmp_path), {"w": FULL})


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = DcpSource(put_together(tmp_path, {"w": FULL}))
    os.truncate(tmp_path / "__0_0.distcp", 750)
    with pytest.raises(SourceError) as caught:
        source.rows(source.specs[0], 0, 8)
    assert str(caught.value) == (
        f"a truncated data file in {tmp_path / '__0_0.distcp'}: expected 864 bytes, found 750."
        " Copy the file here again, or use another step."
    )


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_flipped_bytes_give_our_errors_or_values_of_the_right_shape(file: str, tmp_path: Path) -> None:
    intact = save(tmp_path / "intact", {"model": {"w": FULL, "n": FULL[0].bfloat16()}, "optim": {"step": 3}})
    data = (intact / file).read_bytes()
    draw = random.Random(0)
    for turn in range(150):
        folder = shutil.copytree(intact, tmp_path / f"{turn}")
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 8])):
            damaged[draw.randrange(len(data))] ^= draw.randint(1, 255)
        (folder / file).write_bytes(damaged)
        try:
            read_all(folder)
        except ExportError:
            continue
        finally:
            shutil.rmtree(folder)
