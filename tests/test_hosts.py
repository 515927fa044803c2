"""The command on several hosts: agents of torchrun that meet, each with one rank, and write one folder together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dcp_folders import save
from rank_folders import save_as_verl
from ranks import free_port, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import export_checkpoint

ROOT = Path(__file__).parents[1]
# Every process that Python starts with this on its path leaves behind how many bytes it wrote.
COUNTS = """
import atexit, os, pathlib
io, rank = pathlib.Path("/proc/self/io"), os.environ.get("RANK", "")
atexit.register(lambda: rank and pathlib.Path(__file__).with_name(f"rank-{rank}").write_text(io.read_text()))
"""


def save_both(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(255, 257) for _ in range(16)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save(folder / "dcp", model.state_dict())
    save_as_verl(folder / "verl", model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_both, 2, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "verl"])
def test_ranks_on_two_hosts_write_one_folder(kind: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTS)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", str(free_port()))
    export = ("-m", "fsdp_export", saved / kind, "--out", tmp_path / "out", "--no-fsync")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meet, "--node-rank", str(host), *export],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    said = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "".join(stdout for stdout, _ in said).count("wrote 32 tensors") == 1
    export_checkpoint(saved / kind, tmp_path / "alone", fsync=False)
    expected = (tmp_path / "alone" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    for rank in range(2):
        written = re.search(r"wchar: (\d+)", (tmp_path / f"rank-{rank}").read_text())
        assert written
        assert 0.4 < int(written[1]) / len(expected) < 0.6
