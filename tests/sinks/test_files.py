"""The file sink by itself: where rows go, how often files are opened, what a folder looks like afterwards."""

import json
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_export import __version__
from fsdp_export.errors import SinkError
from fsdp_export.layout import split_into_files
from fsdp_export.plan import Plan
from fsdp_export.publish import MARKER
from fsdp_export.sinks.files import FileSink
from fsdp_export.spec import Sharding, TensorSpec
from fsdp_export.steps import Piece, copy_step

TENSORS = {
    "w": torch.randn(7, 5),
    "half": torch.randn(3, 2, 4).bfloat16(),
    "scalar": torch.tensor(2**40 + 1),
    "empty": torch.zeros(0, 5),
    "flags": torch.rand(9) > 0.5,
}
PLAN = Plan(
    tuple(
        copy_step(TensorSpec(name, tuple(tensor.shape), tensor.dtype, Sharding.replicated((0,))))
        for name, tensor in TENSORS.items()
    )
)


def pieces(seed: int = 0) -> list[Piece]:
    """Cut the tensors into rows, in any order."""
    cut = []
    for info in PLAN.outputs:
        tensor = TENSORS[info.name]
        cut += [Piece(info, row, tensor[row : row + 1]) for row in range(len(tensor))] if tensor.dim() else []
        cut += [] if tensor.dim() else [Piece(info, 0, tensor)]
    random.Random(seed).shuffle(cut)
    return cut


def export(sink: FileSink, given: list[Piece] | None = None) -> None:
    sink.open(PLAN, 0, sink.begin(PLAN, []))
    for piece in pieces() if given is None else given:
        sink.write(piece)
    sink.close()
    sink.commit()


def assert_exported(folder):
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("limit", [40, "1GB"])
@pytest.mark.parametrize("fsync", [True, False], ids=["fsync", "no-fsync"])
def test_rows_in_any_order(tmp_path, limit, fsync):
    sink = FileSink(tmp_path, lay_out_files=lambda plan: split_into_files(plan.outputs, limit), fsync=fsync)
    export(sink)
    assert_exported(tmp_path)
    record = json.loads((tmp_path / MARKER).read_text())
    assert record["fsdp_export"] == __version__
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safet*")}
    assert sink.written == sizes == {name: facts["bytes"] for name, facts in record["files"].items()}
    assert sum(facts["tensors"] for facts in record["files"].values()) == len(TENSORS)
    assert not list(tmp_path.glob(".*"))


def test_views_that_are_not_contiguous(tmp_path):
    columns = TENSORS["w"].t().contiguous().t()
    export(FileSink(tmp_path), [p for p in pieces() if p.info.name != "w"] + [Piece(PLAN.outputs[0], 0, columns)])
    assert_exported(tmp_path)


@pytest.mark.parametrize("fsync", [True, False])
def test_bytes_go_to_the_disk_while_more_are_written(tmp_path, fsync, monkeypatch):
    monkeypatch.setattr("fsdp_export.sinks.writeback._BYTES_BETWEEN", 1)
    synced, fdatasync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(fdatasync(file)))
    export(FileSink(tmp_path, fsync=fsync))
    assert bool(synced) == fsync


def test_every_file_is_opened_once_to_write(tmp_path, monkeypatch):
    opened: list[str] = []
    real_open = os.open

    def counting(path, flags, *rest, **options):
        if flags & os.O_WRONLY:
            opened.append(Path(path).name)
        return real_open(path, flags, *rest, **options)

    sink = FileSink(tmp_path, lay_out_files=lambda plan: split_into_files(plan.outputs, 40))
    ticket = sink.begin(PLAN, [])
    monkeypatch.setattr(os, "open", counting)
    sink.open(PLAN, 0, ticket)
    for piece in pieces():
        sink.write(piece)
    sink.close()
    assert (
        len(opened)
        == len(set(opened))
        == len([layout for layout in sink.layouts if layout.num_bytes > len(layout.header)])
    )
    sink.commit()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_modes_follow_the_umask(tmp_path, umask):
    old = os.umask(umask)
    try:
        export(FileSink(tmp_path / "out"))
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    export(FileSink(tmp_path / "out", overwrite=True))
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert_exported(tmp_path / "out")


def test_abort_leaves_the_old_checkpoint(tmp_path):
    export(FileSink(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sink = FileSink(tmp_path)
    sink.open(PLAN, 0, sink.begin(PLAN, []))
    sink.write(pieces()[0])
    sink.abort()
    sink.abort()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_stale_files_are_removed_and_told(tmp_path):
    export(FileSink(tmp_path, lay_out_files=lambda plan: split_into_files(plan.outputs, 40)))
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    sink = FileSink(tmp_path)
    export(sink)
    assert sink.removed == shards
    assert_exported(tmp_path)


def test_too_little_space_is_told_before_anything_is_written(tmp_path):
    huge = Plan((copy_step(TensorSpec("w", (2**50,), torch.float32, Sharding.replicated((0,)))),))
    sink = FileSink(tmp_path)
    with pytest.raises(SinkError, match=r"too little free space in .*expected 4,503,599,627,.* bytes, found .* bytes"):
        sink.begin(huge, [])
    sink.abort()
    assert not list(tmp_path.iterdir())
