"""What the options of torch's writer make of the same checkpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_folders import edit_metadata, put_together, save
from models import shard, tiny
from ranks import run_ranks
from stored_sources import assert_equal, assert_holds
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

from fsdp_export.errors import SourceError
from fsdp_export.sources.dcp import DcpSource
from fsdp_export.sources.zstd import Unpacked

FULL = torch.arange(40.0).view(8, 5)

WRITERS: dict[str, Any] = {
    "threads": lambda: {"thread_count": 3},
    "files of tensors": lambda: {"single_file_per_rank": False},
    "safetensors": lambda: {"serialization_format": SerializationFormat.SAFETENSORS},
    "safetensors, threads": lambda: {"serialization_format": SerializationFormat.SAFETENSORS, "thread_count": 2},
    "zstd": lambda: {"_extensions": [ZStandard()]},
    "metadata per rank": dict,
}


def save_all(folder: Path, layout: str) -> None:
    model = shard(tiny(tied=False), layout, dist.get_world_size())
    for kind, options in WRITERS.items():
        if kind != "zstd" or ZStandard.is_available():
            writer = FileSystemWriter(folder / kind, **options())
            collectives = {"use_collectives": False} if kind == "metadata per rank" else {}
            save(folder / kind, {"model": model.state_dict(), "step": 3}, storage_writer=writer, **collectives)


@pytest.fixture(
    scope="module",
    params=[(2, "dim1"), (4, "tp")],
    ids=lambda param: "-".join(map(str, param)),
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a checkpoint of each kind, and how many ranks saved it."""
    world_size, layout = request.param
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, world_size, folder, layout)
    return folder, world_size


@pytest.fixture
def zstd() -> Any:
    return pytest.importorskip("zstandard")


@pytest.mark.parametrize("kind", WRITERS)
def test_what_ranks_saved_is_the_unsharded_state_dict(
    saved: tuple[Path, int], kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "zstd":
        request.getfixturevalue("zstd")
    folder, world_size = saved[0] / kind, saved[1]
    source = DcpSource(folder)
    assert_holds(source, tiny(tied=False).state_dict())
    assert source.skipped == ("step",)
    num_files = len(list(folder.glob("*.distcp")))
    assert f"of {world_size} ranks, {num_files} data files" in source.description
    assert (folder / ".metadata").exists() != (kind == "metadata per rank")


def test_metadata_of_all_ranks_count_before_those_of_each(tmp_path: Path) -> None:
    put_together(tmp_path, {"w": FULL})
    put_together(tmp_path / "old", {"w": FULL + 1}, only_rank=0)
    (tmp_path / "old" / "__0.metadata").rename(tmp_path / "__0.metadata")
    assert_holds(DcpSource(tmp_path), {"w": FULL})


def test_copies_of_a_tensor_are_compared_row_by_row(tmp_path: Path) -> None:
    for rank in range(3):
        put_together(tmp_path, {"w": FULL + (rank == 2) * FULL.ge(39)}, only_rank=rank)
    source = DcpSource(tmp_path)
    assert_equal(source.rows(source.specs[0], 2, 7), FULL[2:7])
    with pytest.raises(SourceError, match=r"different copies for 'w' in .*: found __0_0\.distcp and __2_0\.distcp"):
        source.rows(source.specs[0], 6, 8)


def compress(folder: Path, module: Any, *, change: Any = lambda data: data) -> Path:
    """Compress the only chunk of a folder."""
    put_together(folder, {"w": FULL})
    file = folder / "__0_0.distcp"
    file.write_bytes(change(module.compress(file.read_bytes())))

    def edit(metadata: Any) -> None:
        (info,) = metadata.storage_data.values()
        info.length, info.transform_descriptors = file.stat().st_size, ["stream.zstd/1"]

    edit_metadata(folder, edit)
    return folder


def test_a_compressed_chunk_is_unpacked_once(zstd: Any, reads: list[int], tmp_path: Path) -> None:
    source = DcpSource(compress(tmp_path, zstd))
    for row in range(8):
        assert_equal(source.rows(source.specs[0], row, row + 1), FULL[row : row + 1])
    assert sum(reads) == (tmp_path / "__0_0.distcp").stat().st_size


@pytest.mark.parametrize("package", ["zstandard", "pyzstd"])
def test_either_package_unpacks_frames_one_after_another(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = pytest.importorskip(package)
    monkeypatch.setitem(sys.modules, {"zstandard": "pyzstd", "pyzstd": "zstandard"}[package], None)
    source = DcpSource(compress(tmp_path, module, change=lambda data: module.compress(b"") + data))
    assert_holds(source, {"w": FULL})


def test_without_a_package_it_says_which_to_install(zstd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compress(tmp_path, zstd)
    for package in ("zstandard", "pyzstd"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SourceError) as caught:
        DcpSource(tmp_path)
    assert str(caught.value) == (
        "a tensor compressed with zstd, for which neither of its packages is installed, for 'w' in "
        f"{tmp_path}/__0_0.distcp. Install zstandard."
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("garbage", "a damaged zstd stream at byte 0 for 'w' in {file}: found "),
        ("truncated", "no archive at byte 0 for 'w' in {file}. "),
        ("bomb", "a zstd stream larger than its tensor at byte 0 for 'w' in {file}: expected at most 1,048,736 bytes"),
    ],
)
def test_a_damaged_stream_is_refused(zstd: Any, damage: str, message: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "garbage": lambda data: b"?" + data[1:],
        "truncated": lambda data: data[:-9],
        "bomb": lambda _: zstd.compress(bytes(1 << 24)),
    }
    compress(tmp_path, zstd, change=changes[damage])
    with pytest.raises(SourceError) as caught:
        DcpSource(tmp_path)
    assert str(caught.value).startswith(message.format(file=tmp_path / "__0_0.distcp"))


def test_no_bytes_are_read_behind_what_was_unpacked(tmp_path: Path) -> None:
    unpacked = Unpacked(tmp_path, bytearray(b"abc"))
    assert unpacked.read("f", 1, 2) == b"bc"
    with pytest.raises(SourceError) as caught:
        unpacked.read_into("f", 1, memoryview(bytearray(3)))
    assert str(caught.value) == f"a truncated chunk in {tmp_path}/f: expected 4 bytes, found 3"
