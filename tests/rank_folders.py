"""Rank files: saved as verl and accelerate save them, put together from full tensors, or changed byte by byte.

As a program, `python tests/rank_folders.py FILE.zip` saves a `Zoo` on 4 ranks with the torch that runs it, which is how
the archives in `tests/sources/rank_files` were made.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

MeshMaker = Callable[[], DeviceMesh]


def rank_file(rank: int, world_size: int) -> str:
    """Return what verl calls the model's file of a rank."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def save_as_verl(folder: Path, model: nn.Module) -> None:
    """Save as verl's `FSDPCheckpointManager` does, with the files that it puts beside the model's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / rank_file(rank, world_size))
    torch.save({"state": {}, "param_groups": []}, folder / f"optim_world_size_{world_size}_rank_{rank}.pt")
    torch.save({"lr_scheduler": None, "rng": {}}, folder / f"extra_state_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))


def save_as_accelerate(
    folder: Path,
    model: nn.Module,
    kind: StateDictType,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> None:
    """Save with accelerate, which for its own part does not train on CPUs."""
    import accelerate

    plugin = SimpleNamespace(
        state_dict_type=kind,
        fsdp_version=2,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=None,
    )
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size(), process_index=dist.get_rank(), wait_for_everyone=lambda: None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate.PartialState(cpu=True)
        accelerate.utils.save_fsdp_model(plugin, accelerator, model, folder, **options)
        if optimizer is not None:
            accelerate.utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, **options)


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of many, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def put_ranks(
    folder: Path,
    state_dict: Callable[[int], Mapping[str, Any]],
    world_size: int,
    *,
    name: Callable[[int, int], str] = rank_file,
    only: Sequence[int] | None = None,
    **options: Any,
) -> Path:
    """Save what every rank has, one after the other.

    Args:
        folder: Where to; made if it is not there.
        state_dict: Makes what a rank saves; called with the rank while this process is it.
        world_size: Number of ranks.
        name: Names a rank's file.
        only: The ranks whose files are wanted; None for all.
        **options: For `torch.save`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size) if only is None else only:
        with as_rank(rank, world_size):
            torch.save(state_dict(rank), folder / name(rank, world_size), **options)
    return folder


def cut(full: torch.Tensor, mesh: DeviceMesh, cuts: Sequence[tuple[int, int]], **spec: Any) -> DTensor:
    """Make a DTensor of a full tensor without torch's help.

    Args:
        full: The full tensor.
        mesh: Where it lies.
        cuts: Pairs of a dim and a mesh axis, in the order in which the tensor is cut.
        **spec: What to change of the spec once it is made.
    """
    local, is_on_mesh = full, mesh.get_coordinate() is not None
    for dim, axis in cuts:
        if is_on_mesh:
            pieces = local.chunk(mesh.size(axis), dim)
            position = mesh.get_local_rank(axis)  # the group's, whose ranks ascend, whatever the mesh says
            local = pieces[position] if position < len(pieces) else local.narrow(dim, 0, 0)
    placements = _placements(mesh.ndim, [mesh.size(axis) for axis in range(mesh.ndim)], cuts)
    dtensor = DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )
    for attribute, value in spec.items():
        setattr(dtensor._spec, attribute, value)
    return dtensor


def _placements(num_axes: int, sizes: Sequence[int], cuts: Sequence[tuple[int, int]]) -> list[Placement]:
    placements: list[Placement] = [Replicate() for _ in range(num_axes)]
    for position, (dim, axis) in enumerate(cuts):
        before = [sizes[other] for same, other in cuts[:position] if same == dim and other > axis]
        parts = math.prod(before)
        placements[axis] = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    return placements


def edit_archive(file: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a file of `torch.save` anew, member by member.

    Args:
        file: The file.
        change: Makes of a member's name, without the folder in the archive, and bytes the new bytes.
        compression: How the members called `data/<key>` are stored.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(stream, "w") as new:
        for member in old.infolist():
            name = member.filename.partition("/")[2]
            kind = compression if name.startswith("data/") else zipfile.ZIP_STORED
            new.writestr(member.filename, change(name, old.read(member)), kind)
    file.write_bytes(stream.getvalue())


def edit_pickle(file: Path, *changes: tuple[bytes, bytes]) -> None:
    """Replace bytes in the pickle of a file of `torch.save`; each must be there."""

    def change(name: str, data: bytes) -> bytes:
        for old, new in changes if name == "data.pkl" else ():
            assert old in data
            data = data.replace(old, new)
        return data

    edit_archive(file, change)


class Zoo(nn.Module):
    """One tensor for each way in which FSDP2 with tensor parallelism leaves one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.rows = nn.Parameter(torch.randn(7, 3, generator=draw))
        self.columns = nn.Parameter(torch.randn(5, 6, generator=draw))
        self.plain = nn.Parameter(torch.randn(6, generator=draw))
        self.one_row = nn.Parameter(torch.randn(1, 4, generator=draw))
        self.apart = nn.Parameter(torch.randn(6, 2, generator=draw))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.randn(2, generator=draw))

    def shard(self) -> Zoo:
        """Shard it on a mesh of 2x2; `apart` is only on the inner axis. Collective."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        placements = {"rows": Shard(0), "columns": Shard(1), "plain": Replicate(), "apart": Shard(0)}
        for name, placement in placements.items():
            full = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(full, mesh["tp"], [placement])))
        fully_shard(self, mesh=mesh["dp_shard"], ignored_params={self.apart})
        return self


def _save_zoo(folder: Path) -> None:
    torch.save(Zoo().shard().state_dict(), folder / rank_file(dist.get_rank(), 4))


def _main() -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
        run_ranks(_save_zoo, 4, Path(folder))
        for file in sorted(Path(folder).iterdir()):
            archive.write(file, file.name)


if __name__ == "__main__":
    _main()
