"""Which processes a launcher started, and whether they find each other."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import free_port, run_ranks

from fsdp_export import launch
from fsdp_export.errors import RankError, UsageError
from fsdp_export.launch import Group, joined_group, launched_ranks, speaks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
}
VARIABLES = {*TORCHRUN, *SRUN, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK"}


@pytest.fixture
def environ(monkeypatch):
    """The environment of a process that no launcher started."""
    for name in VARIABLES:
        # Set first, so that what the code under test sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def rendezvous(rank, size, address, port):
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, id="torchrun-of-one"),
        pytest.param({"WORLD_SIZE": "1"}, id="world-of-one"),
        pytest.param({"WORLD_SIZE": ""}, id="empty"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, id="srun-of-one"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="sbatch-without-srun"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, id="mpirun-of-one"),
    ],
)
def test_a_process_alone(environ):
    assert launched_ranks(environ) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, rendezvous("3", "8", "node1", "29500"), id="torchrun"),
        pytest.param({**SRUN, **TORCHRUN}, rendezvous("3", "8", "node1", "29500"), id="torchrun-within-srun"),
        pytest.param(SRUN, rendezvous("3", "8", "gpu07", "23458"), id="srun"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_NODES": "1"}, rendezvous("3", "8", "127.0.0.1", "23458"), id="srun-on-one-node"
        ),
        pytest.param(
            {**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "29400"},
            rendezvous("3", "8", "other", "29400"),
            id="srun-with-an-address",
        ),
        pytest.param({**SRUN, "PMI_SIZE": "8"}, rendezvous("3", "8", "gpu07", "23458"), id="srun-with-pmi"),
    ],
)
def test_processes_that_find_each_other(environ, expected):
    assert launched_ranks(environ) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("node[001-004,009],gpu[1-2]", "node001"),
        ("rack[2,5]-node[10-12]-ib", "rack2-node10-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    ranks = launched_ranks({**SRUN, "SLURM_STEP_NODELIST": nodes})
    assert ranks is not None
    assert ranks["MASTER_ADDR"] == first


def test_two_steps_of_a_job_do_not_share_a_port():
    ports = {launched_ranks({**SRUN, "SLURM_STEP_ID": step})["MASTER_PORT"] for step in "123"}
    assert len(ports) == 3


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_processes_that_did_not_join_are_refused(name):
    with pytest.raises(UsageError) as caught:
        launched_ranks({name: "4"})
    assert str(caught.value) == (
        f"4 processes were started ({name}) that did not join a group: each would write all. "
        "Use torchrun --nproc-per-node N -m fsdp_export ..., or start one process without that variable."
    )


def test_tasks_without_an_address_are_refused():
    nowhere = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(UsageError, match="srun started 8 processes that cannot find each other"):
        launched_ranks(nowhere)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(UsageError) as caught:
        launched_ranks({name: "four"})
    assert str(caught.value) == f"the environment variable {name} is no number: found 'four'. Unset {name}."


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, True, id="alone"),
        pytest.param(TORCHRUN, False, id="torchrun"),
        pytest.param({**TORCHRUN, "RANK": "0"}, True, id="torchrun-first"),
        pytest.param({"RANK": "3", "WORLD_SIZE": "8"}, True, id="who-knows-whether-there-are-others"),
        pytest.param(SRUN, False, id="srun"),
        pytest.param({**SRUN, "SLURM_PROCID": "0"}, True, id="srun-first"),
        pytest.param({"SLURM_PROCID": "3"}, True, id="no-step"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, False, id="open-mpi"),
        pytest.param({"PMI_SIZE": "4", "PMI_RANK": "0"}, True, id="pmi-first"),
    ],
)
def test_one_process_speaks_before_they_have_joined(environ, expected):
    assert speaks(environ) is expected


def test_a_process_alone_joins_nothing(environ):
    with joined_group() as group:
        assert group == Group((0,), 0)
        assert group.is_lead
        assert group.is_first_to("do this")
        assert group.is_first_to("do this")
        assert not dist.is_initialized()


def test_processes_join_and_one_of_them_speaks(environ):
    port = free_port()

    def join():
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ.update(rendezvous(str(rank), "3", "127.0.0.1", str(port)))
        with joined_group() as group:
            store = dist.distributed_c10d._get_default_store()
            deeds = [group.is_first_to("speak"), group.is_first_to("speak"), group.is_first_to(f"speak of {rank}")]
            store.add("asked", 1)
            while store.add("asked", 0) < 3:
                pass
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return group.ranks, group.rank, group.is_lead, deeds

    results = run_ranks(join, 3)
    assert [result[:3] for result in results] == [((0, 1, 2), rank, rank == 0) for rank in range(3)]
    deeds = [result[3] for result in results]
    assert sorted(first for first, _, _ in deeds) == [False, False, True]
    assert not any(second for _, second, _ in deeds)
    assert all(own for _, _, own in deeds)


def test_a_process_whose_others_never_come_says_so(environ, caplog):
    for name, value in rendezvous("0", "2", "127.0.0.1", str(free_port())).items():
        environ.setenv(name, value)
    environ.setattr(launch, "_TIMEOUT", timedelta(seconds=2))
    environ.setattr(launch, "_WARNING_SECONDS", 0.1)
    with pytest.raises(RankError) as caught, joined_group():
        pass
    assert str(caught.value).startswith("rank 0 of 2 at 127.0.0.1:")
    assert str(caught.value).endswith("Start all of them, or unset WORLD_SIZE to run alone.")
    assert "waits for the others" in caplog.text
    assert not dist.is_initialized()
