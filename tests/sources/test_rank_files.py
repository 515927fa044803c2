import gc
import math
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import meshes_for, shard, tiny
from rank_folders import (
    Zoo,
    cut,
    edit_archive,
    edit_pickle,
    put_ranks,
    rank_file,
    save_as_accelerate,
    save_as_verl,
)
from ranks import run_ranks
from refused.rank_files import REFUSED, Maker
from stored_sources import assert_equal, assert_holds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import Shard, _dtensor_spec

from fsdp_export.errors import ExportError, SourceError
from fsdp_export.sources.base import Source
from fsdp_export.sources.rank_files import RankFilesSource, recognizes

FULL = torch.arange(40.0).view(8, 5)
SAVED = Path(__file__).with_name("rank_files")


def read_all(path: Path) -> None:
    source = RankFilesSource(path)
    for spec in source.specs:
        assert source.rows(spec, 0, spec.num_rows).shape == spec.shape


def on_mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def halves(rank: int, full: torch.Tensor = FULL) -> dict[str, Any]:
    return {"w": cut(full, on_mesh(2), [(0, 0)])}


def save_sharded(folder: Path, layout: str) -> None:
    save_as_verl(folder, shard(tiny(), layout, dist.get_world_size()))


@pytest.mark.parametrize(
    ("world_size", "layout"), [(size, layout) for size in (1, 2, 4) for layout in meshes_for(size)], ids=str
)
def test_what_verl_saved_is_the_unsharded_state_dict(world_size: int, layout: str, tmp_path: Path) -> None:
    run_ranks(save_sharded, world_size, tmp_path, layout)
    source = RankFilesSource(tmp_path)
    assert_holds(source, tiny().state_dict())
    assert source.skipped == ()
    assert source.description.startswith(f"verl rank files, world size {world_size}, mesh ")


def test_neither_a_config_nor_a_process_group_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_ranks(save_sharded, 2, tmp_path, "1d")
    (tmp_path / "fsdp_config.json").unlink()
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(dist, "init_process_group", None)
    assert_holds(RankFilesSource(tmp_path), tiny().state_dict())


def save_with_accelerate(folder: Path, layout: str) -> None:
    model = shard(tiny(), layout, dist.get_world_size())
    save_as_accelerate(folder, model, StateDictType.SHARDED_STATE_DICT, use_dcp=False)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "dim1"), (4, "hsdp"), (4, "tp")], ids=str)
def test_what_accelerate_saved_is_the_unsharded_state_dict(world_size: int, layout: str, tmp_path: Path) -> None:
    run_ranks(save_with_accelerate, world_size, tmp_path, layout)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"pytorch_model_fsdp_0_rank{rank}.bin" for rank in range(world_size)
    ]
    source = RankFilesSource(tmp_path)
    assert_holds(source, tiny().state_dict())
    assert source.description.startswith(f"accelerate rank files, world size {world_size}, mesh ")


def save_fsdp1(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig

    torch.manual_seed(0)
    mesh, cpu = on_mesh(dist.get_world_size()), torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(5, 7), device_mesh=mesh, device_id=cpu)
        config = ShardedStateDictConfig(offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            save_as_verl(folder, model)


def test_what_fsdp1_saved_on_a_mesh_is_read(tmp_path: Path) -> None:
    run_ranks(save_fsdp1, 2, tmp_path)
    torch.manual_seed(0)
    assert_holds(RankFilesSource(tmp_path), nn.Linear(5, 7).state_dict())


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0", "2.14.1"])
def test_what_other_versions_of_torch_saved_is_read(version: str, tmp_path: Path) -> None:
    zipfile.ZipFile(SAVED / f"torch-{version}.zip").extractall(tmp_path)
    source = RankFilesSource(tmp_path)
    expected = Zoo().state_dict()
    assert_holds(source, {spec.name: expected[spec.name] for spec in source.specs})
    assert len(source.specs) == len(expected)
    assert source.description == (
        "verl rank files, world size 4, mesh 2x2 (dp_shard, tp), 7 tensors, 308 B, float32 and int64"
    )


def test_what_torch_saved_before_dtensor_was_public_is_read(tmp_path: Path) -> None:
    zipfile.ZipFile(SAVED / "torch-2.4.1-fsdp1.zip").extractall(tmp_path)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).state_dict()
    source = RankFilesSource(tmp_path)
    assert_holds(source, expected)
    assert "mesh 2x2 (ddp, fsdp)" in source.description


def save_zoo(folder: Path) -> None:
    save_as_verl(folder, Zoo().shard())


def test_a_tensor_on_an_inner_axis_alone_is_read(tmp_path: Path) -> None:
    run_ranks(save_zoo, 4, tmp_path)
    source = RankFilesSource(tmp_path)
    expected = Zoo().state_dict()
    assert_holds(source, {spec.name: expected[spec.name] for spec in source.specs})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.uint16,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (5, 4, 16), dtype=torch.uint8, generator=draw)
    full = raw.view(dtype)

    def state_dict(rank: int) -> dict[str, Any]:
        # Values of fp8 cannot be cut, but integers as wide can.
        part = cut(raw, on_mesh(3), [(0, 0)]).to_local().view(dtype)
        dtensor = cut(torch.empty(full.shape), on_mesh(3), [(0, 0)])
        dtensor._local_tensor = part
        return {"w": dtensor, "plain": full, "scalar": full[0, 0, 0], "empty": full.new_empty(0, 5)}

    source = RankFilesSource(put_ranks(tmp_path, state_dict, 3))
    assert_holds(source, {"w": full, "plain": full, "scalar": full[0, 0, 0], "empty": full.new_empty(0, 5)})


@pytest.mark.parametrize(
    ("shape", "world_size"), [((6, 3), 4), ((1, 17), 2), ((5, 4), 2), ((2, 3), 4), ((7,), 3)], ids=str
)
def test_uneven_rows_and_ranks_without_rows(shape: tuple[int, ...], world_size: int, tmp_path: Path) -> None:
    full = torch.arange(float(math.prod(shape))).view(shape)
    put_ranks(tmp_path, lambda _: {"w": cut(full, on_mesh(world_size), [(0, 0)])}, world_size)
    assert_holds(RankFilesSource(tmp_path), {"w": full}, num_slices=10)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[int, ...], list[tuple[int, int]]]:
    """Draw ranks in any order along each axis, the sizes of a mesh of them, a shape, and cuts in any order."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 12))
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    for axis, size in enumerate(sizes):
        ranks = ranks.index_select(axis, torch.tensor(draw(st.permutations(range(size)))))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(sizes))))
    chosen = axes[: draw(st.integers(0, len(axes)))]
    return ranks.flatten().tolist(), sizes, shape, [(draw(st.integers(0, len(shape) - 1)), axis) for axis in chosen]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), data=st.data())
def test_rows_are_put_together_from_any_mesh(layout: Any, data: st.DataObject, tmp_path: Path) -> None:
    ranks, sizes, shape, cuts = layout
    full = torch.arange(float(math.prod(shape))).view(shape)
    folder = tmp_path / "ckpt"
    shutil.rmtree(folder, ignore_errors=True)
    put_ranks(
        folder,
        lambda _: {"w": cut(full, DeviceMesh("cpu", torch.tensor(ranks).view(sizes)), cuts)},
        len(ranks),
    )
    source = RankFilesSource(folder)
    first = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(first, shape[0]))
    assert_equal(source.rows(source.specs[0], first, stop), full[first:stop])
    source.close()


def save_permuted(folder: Path, ranks: list[list[int]]) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(ranks).squeeze(0), mesh_dim_names=("a", "b")[: min(len(ranks), 2)])
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    fully_shard(model, mesh=mesh)
    save_as_verl(folder, model)


@pytest.mark.parametrize("ranks", [[[1, 0]], [[2, 0, 1]], [[3, 2], [1, 0]], [[1, 0], [3, 2]]], ids=str)
def test_on_a_permuted_mesh_rows_lie_where_its_groups_say(ranks: list[list[int]], tmp_path: Path) -> None:
    run_ranks(save_permuted, len(ranks) * len(ranks[0]), tmp_path, ranks)
    torch.manual_seed(0)
    assert_holds(RankFilesSource(tmp_path), dict(nn.Linear(3, 5).state_dict()))


def test_a_mesh_whose_groups_do_not_follow_it_is_refused(tmp_path: Path) -> None:
    crossed = torch.tensor([[0, 3], [2, 1]])
    put_ranks(tmp_path, lambda _: {"w": cut(FULL, DeviceMesh("cpu", crossed), [(0, 1), (1, 0)])}, 4)
    with pytest.raises(SourceError, match=r"makes no sense for 'w' .*: found a mesh whose process groups"):
        RankFilesSource(tmp_path)


def outer_and_inner() -> DeviceMesh:
    pytest.importorskip("torch.distributed._mesh_layout", reason="a flattened mesh is like any other")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    return mesh["a", "c"]._flatten("ac")


def odd_ranks() -> DeviceMesh:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DeviceMesh("cpu", [7, 3, 1])


@pytest.mark.parametrize(
    ("make_mesh", "description"),
    [(outer_and_inner, "mesh 4 (ac)"), (odd_ranks, "mesh 3")],
    ids=["flattened", "some ranks"],
)
def test_meshes_that_are_not_the_world(make_mesh: Callable[[], DeviceMesh], description: str, tmp_path: Path) -> None:
    put_ranks(tmp_path, lambda _: {"w": cut(FULL, make_mesh(), [(0, 0)])}, 8)
    source = RankFilesSource(tmp_path)
    assert_holds(source, {"w": FULL})
    assert source.description.startswith(f"verl rank files, world size 8, {description}, 1 tensor")


def test_an_order_of_shards_that_the_placements_do_not_tell_is_followed(tmp_path: Path) -> None:
    entry = getattr(_dtensor_spec, "ShardOrderEntry", None) or pytest.skip("this torch has no order of shards")
    order = (entry(0, (1, 0)),)

    def state_dict(rank: int) -> dict[str, Any]:
        spec = {"placements": (Shard(0), Shard(0)), "shard_order": order, "use_strided_shard_as_shard_order": False}
        return {"w": cut(FULL, on_mesh(2, 2), [(0, 1), (0, 0)], **spec)}

    assert_holds(RankFilesSource(put_ranks(tmp_path, state_dict, 4)), {"w": FULL})


@pytest.mark.parametrize("options", [{"pickle_protocol": 3}, {"pickle_protocol": 4}, {"pickle_protocol": 5}], ids=str)
def test_other_pickle_protocols_are_read(options: dict[str, Any], tmp_path: Path) -> None:
    assert_holds(RankFilesSource(put_ranks(tmp_path, halves, 2, **options)), {"w": FULL})


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        put_ranks(tmp_path, halves, 2)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert_holds(RankFilesSource(tmp_path), {"w": FULL})


def save_with_attributes(folder: Path) -> None:
    sharded, plain, tensor = nn.Parameter(halves(dist.get_rank())["w"]), nn.Parameter(FULL.clone()), FULL.clone()
    for each in (sharded, plain, tensor):
        vars(each)["is_expert"] = True
    torch.save({"w": sharded, "plain": plain, "tensor": tensor}, folder / rank_file(dist.get_rank(), 2))


def test_parameters_and_attributes_of_tensors_are_read(tmp_path: Path) -> None:
    run_ranks(save_with_attributes, 2, tmp_path)
    assert_holds(RankFilesSource(tmp_path), {"w": FULL, "plain": FULL, "tensor": FULL})


def test_one_rank_with_plain_tensors_is_ordinary(tmp_path: Path) -> None:
    model = tiny()
    torch.save(model.state_dict(), tmp_path / rank_file(0, 1))
    source = RankFilesSource(tmp_path)
    assert_holds(source, model.state_dict())
    assert source.description == "verl rank files, world size 1, 15 tensors, 1.84 kB, float32 and int64"


def test_plain_tensors_that_all_ranks_have_alike_are_taken_once(tmp_path: Path) -> None:
    buffers = {
        "scale": torch.ones(1),
        "scalar": torch.tensor(float("nan")),
        "count": torch.tensor(2**40),
        "large": torch.randn(3000, 512),
        "view": torch.randn(4, 6)[:, 1:3].t(),
    }
    put_ranks(tmp_path, lambda rank: {**buffers, **halves(rank)}, 4)
    assert_holds(RankFilesSource(tmp_path), {**buffers, "w": FULL})


@pytest.mark.parametrize("row", [0, 700, 2999])
def test_a_copy_that_differs_in_one_value_is_found(row: int, tmp_path: Path) -> None:
    def state_dict(rank: int) -> dict[str, Any]:
        full = torch.zeros(3000, 512)
        full[row, 511] = rank == 2
        return {"w": full}

    put_ranks(tmp_path, state_dict, 3)
    with pytest.raises(SourceError, match=r"plain tensors that differ .* other values in .*_rank_2.pt than in .*_0.pt"):
        RankFilesSource(tmp_path)


def test_missing_files_of_replicas_are_not_missed(tmp_path: Path) -> None:
    put_ranks(tmp_path, lambda _: {"w": cut(FULL, on_mesh(2, 2), [(0, 1)])}, 4)
    (tmp_path / rank_file(0, 4)).unlink()
    (tmp_path / rank_file(3, 4)).unlink()
    source = RankFilesSource(tmp_path)
    assert_holds(source, {"w": FULL})
    assert source.description == (
        "verl rank files, world size 4, mesh 2x2, 1 tensor, 160 B, float32, read from 2 files, of which the missing "
        "ones are replicas"
    )


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda tensor: {"model": {"w": tensor}, "step": 3}, ["w"]),
        (lambda tensor: {"_orig_mod.layers.0._checkpoint_wrapped_module.w": tensor}, ["layers.0.w"]),
        (lambda tensor: {"module.w": tensor}, ["w"]),
    ],
    ids=["nested", "wrapped", "ddp"],
)
def test_names_leave_their_wrappers(wrap: Any, names: list[str], tmp_path: Path) -> None:
    put_ranks(tmp_path, lambda rank: wrap(halves(rank)["w"]), 2)
    assert [spec.name for spec in RankFilesSource(tmp_path).specs] == names


def test_a_given_prefix_counts_and_the_rest_is_listed(tmp_path: Path) -> None:
    put_ranks(tmp_path, lambda rank: {"actor": halves(rank), "critic": halves(rank), "step": 3}, 2)
    source = RankFilesSource(tmp_path, prefix="actor")
    assert_holds(source, {"w": FULL})
    assert source.skipped == ("critic.w", "step")
    assert source.description.endswith("float32, below 'actor', 2 other entries left out")


def accelerate_file(rank: int, _world_size: int, index: int = 0) -> str:
    return f"pytorch_model_fsdp_{index}_rank{rank}.bin"


def test_of_several_models_the_first_is_taken_and_a_named_one_instead(tmp_path: Path) -> None:
    put_ranks(tmp_path, halves, 2, name=accelerate_file)
    put_ranks(tmp_path, partial(halves, full=-FULL), 2, name=partial(accelerate_file, index=1))
    source = RankFilesSource(tmp_path)
    assert_holds(source, {"w": FULL})
    assert source.skipped == ("pytorch_model_fsdp_1_rank0.bin", "pytorch_model_fsdp_1_rank1.bin")
    assert_holds(RankFilesSource(tmp_path / "pytorch_model_fsdp_1_rank1.bin"), {"w": -FULL})


def test_of_several_world_sizes_the_named_one_is_taken(tmp_path: Path) -> None:
    put_ranks(tmp_path, halves, 2)
    put_ranks(tmp_path, lambda _: {"w": cut(-FULL, on_mesh(4), [(0, 0)])}, 4)
    assert_holds(RankFilesSource(tmp_path / rank_file(3, 4)), {"w": -FULL})
    assert_holds(RankFilesSource(tmp_path / rank_file(0, 2)), {"w": FULL})


def test_only_the_wanted_rows_are_read(reads: list[int], tmp_path: Path) -> None:
    full = torch.randn(1000, 256)
    put_ranks(tmp_path, lambda _: {"w": cut(full, on_mesh(2, 2), [(0, 1)])}, 4)
    source = RankFilesSource(tmp_path)
    assert sum(reads) < 4 * 5000
    reads.clear()
    assert_equal(source.rows(source.specs[0], 490, 510), full[490:510])
    assert sum(reads) < 20 * 256 * 4 + 300
    reads.clear()
    source.rows(source.specs[0], 10, 13)
    assert sum(reads) == 3 * 256 * 4


def open_files(folder: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and folder in link.readlink().parents for link in links)


def test_files_can_be_closed_and_open_again(tmp_path: Path) -> None:
    source = RankFilesSource(put_ranks(tmp_path, halves, 2))
    source.close()
    assert open_files(tmp_path) == 0
    assert_holds(source, {"w": FULL})
    assert open_files(tmp_path) == 2
    del source
    gc.collect()
    assert open_files(tmp_path) == 0


def test_it_is_a_source_all_of_which_every_rank_has(tmp_path: Path) -> None:
    put_ranks(tmp_path, halves, 2)
    source: Source = RankFilesSource(tmp_path, ranks=(0, 1, 2), rank=2, device=torch.device("meta"))
    assert (source.ranks, source.rank, source.device, source.folder) == ((0, 1, 2), 2, torch.device("meta"), tmp_path)
    (spec,) = source.specs
    assert [ranks for _, ranks in spec.sharding.holders(spec.shape)] == [(0, 1, 2)]
    assert not spec.is_buffer
    assert (source.copies, source.groups) == ((), {})
    source.refresh()
    assert RankFilesSource(tmp_path).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (["fsdp_config.json", rank_file(3, 8)], True),
        (["pytorch_model_fsdp_0_rank0.bin"], True),
        (["pytorch_model_fsdp_rank0.bin"], True),
        (["optim_world_size_2_rank_0.pt", "extra_state_world_size_2_rank_0.pt"], False),
        (["pytorch_model_fsdp.bin", "model.pt", "optimizer_0_rank0.bin"], False),
        ([], False),
    ],
    ids=str,
)
def test_a_folder_is_recognized_by_its_names(names: list[str], is_one: bool) -> None:
    assert recognizes(names) is is_one


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
    ("changes", "found"),
    [
        ([(b"X\x04\x00\x00\x00mesh", b"X\x04\x00\x00\x00mush")], "no mesh"),
        ([(b"_flatten_rank_map", b"_flatten_rank_mob")], "a mesh without its ranks"),
        ([(b"X\x07\x00\x00\x00_layout", b"X\x07\x00\x00\x00_lay_ut")], "no _MeshLayout"),
        ([(b"X\x05\x00\x00\x00shape", b"X\x05\x00\x00\x00shope")], "a mesh without a shape"),
        ([(b"placements", b"plocements")], "no placement for every axis of mesh 2x2"),
        ([(b"X\x03\x00\x00\x00dim", b"X\x03\x00\x00\x00dam")], "a shard of dim None of 2"),
    ],
    ids=["mesh", "ranks", "layout", "shape", "placements", "dim"],
)
def test_a_dtensor_that_makes_no_sense_is_refused(
    changes: Sequence[tuple[bytes, bytes]], found: str, tmp_path: Path
) -> None:
    zipfile.ZipFile(SAVED / "torch-2.14.1.zip").extractall(tmp_path)
    edit_pickle(tmp_path / rank_file(0, 4), *changes)
    with pytest.raises(SourceError) as caught:
        RankFilesSource(tmp_path)
    assert str(caught.value) == (
        f"a DTensor that makes no sense for 'rows' in {tmp_path / rank_file(0, 4)}: found {found}. "
        "Copy the file here again, or use another step."
    )


def test_a_mesh_of_no_ranks_is_refused(tmp_path: Path) -> None:
    def no_ranks(mesh: Any) -> None:
        mesh._flatten_rank_map = ()

    def state_dict(_: int) -> dict[str, Any]:
        mesh = on_mesh(2)
        tensor = cut(FULL, mesh, [(0, 0)])
        no_ranks(mesh)
        return {"w": tensor}

    put_ranks(tmp_path, state_dict, 2)
    with pytest.raises(SourceError, match=r"a DTensor that makes no sense for 'w' .* found a mesh without its ranks"):
        RankFilesSource(tmp_path)


def flip(draw: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 8])):
        damaged[draw.randrange(len(data))] ^= draw.randint(1, 255)
    return bytes(damaged)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def state_dict(rank: int) -> dict[str, Any]:
        mesh = on_mesh(2, 2)
        return {
            "w": cut(FULL, mesh, [(0, 1), (0, 0)]),
            "v": cut(FULL.bfloat16(), mesh, [(1, 0)]),
            "n": torch.tensor(3),
        }

    return put_ranks(tmp_path_factory.mktemp("intact"), state_dict, 4)


def read_damaged(folder: Path) -> None:
    try:
        read_all(folder)
    except ExportError:
        return


def test_flipped_bytes_give_our_errors_or_values_of_the_right_shape(intact: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    for turn in range(200):
        folder = shutil.copytree(intact, tmp_path / f"{turn}")
        file = folder / rank_file(draw.randrange(4), 4)
        file.write_bytes(flip(draw, file.read_bytes()))
        read_damaged(folder)
        shutil.rmtree(folder)


def test_flipped_bytes_of_a_pickle_with_the_right_checksum_do_too(intact: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    for turn in range(300):
        folder = shutil.copytree(intact, tmp_path / f"{turn}")
        change = lambda name, data: flip(draw, data) if name == "data.pkl" else data  # noqa: E731
        edit_archive(folder / rank_file(draw.randrange(4), 4), change)
        read_damaged(folder)
        shutil.rmtree(folder)
