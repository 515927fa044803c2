"""Asynchronous saves, and modules on several devices, where only real devices show it. Run by `bin/test-gpu`."""

from __future__ import annotations

import pytest
import torch
from gpu_models import check_written, make, sharded, shared_folder
from torch import nn

from fsdp_export import Exporter, load_checkpoint, save_checkpoint
from fsdp_export.pending import PendingSave
from fsdp_export.sinks.host_memory import host_memory
from fsdp_export.sinks.staged import StagedSink

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_group")]

folder = pytest.fixture(shared_folder)


def double(model: nn.Module, times: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2**times)


@pytest.mark.parametrize(
    ("kind", "staging", "options"),
    [
        pytest.param("gpu", "device", {}, id="device"),
        pytest.param("gpu", "host", {}, id="host"),
        pytest.param("gpu", "host", {"is_prepared": True}, id="host-prepared"),
        pytest.param("gpu", "auto", {}, id="auto"),
        pytest.param("pinned", "auto", {}, id="offloaded"),
        pytest.param("unpinned", "auto", {"is_prepared": True}, id="offloaded-prepared"),
        pytest.param("some", "device", {}, id="some-offloaded-device"),
        pytest.param("some", "host", {}, id="some-offloaded-host"),
        pytest.param("gpu", "device", {"by_columns": True}, id="gathered-device"),
        pytest.param("pinned", "host", {"by_columns": True}, id="gathered-host"),
        pytest.param("gpu", "device", {"dtype": "bfloat16"}, id="cast-device"),
        pytest.param("pinned", "host", {"dtype": "bfloat16"}, id="cast-offloaded"),
    ],
)
def test_an_asynchronous_save_has_the_values_of_the_call(folder, kind, staging, options):
    model = sharded(kind, by_columns=options.get("by_columns", False))
    exporter = Exporter(model, dtype=options.get("dtype", "keep"))
    exporter.release()
    if options.get("is_prepared"):
        exporter.prepare(staging=staging)
        host_memory().wait()
        assert host_memory().num_bytes > 0
        assert host_memory().is_pinned == (staging == "host")
    for number in range(3):
        wanted = make().to(exporter.plan.outputs[0].dtype)
        double(wanted, number)
        handle = exporter.save(folder / str(number), blocking=False, staging=staging, max_shard_size="2MB")
        double(model, 1)
        assert handle.wait().num_tensors == len(exporter.plan.outputs)
        check_written(folder / str(number), wanted)
    host_memory().wait()
    if staging == "host" and kind == "gpu":
        assert host_memory().is_pinned


def test_a_save_in_the_background_does_not_wait_for_training_and_frees_its_memory(folder):
    model = sharded("gpu")
    exporter = Exporter(model)
    # Memory of the ring and of the allocator is there then.
    exporter.save(folder / "out", blocking=False, staging="device", fsync=False).wait()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handle = exporter.save(folder / "out", blocking=False, staging="device", fsync=False)
    torch.cuda._sleep(8_000_000_000)
    queued = torch.cuda.current_stream().record_event()
    handle.wait()
    assert not queued.query()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    host_memory().wait()


def test_a_snapshot_on_the_device_waits_for_nothing_that_is_queued(folder):
    model, wanted = sharded("gpu"), make()
    exporter = Exporter(model)
    exporter.save(folder / "out", blocking=False, staging="device", max_shard_size="2MB", fsync=False).wait()
    torch.cuda._sleep(2_000_000_000)
    double(model, 1)
    queued = torch.cuda.current_stream().record_event()
    handle = exporter.save(folder / "out", blocking=False, staging="device", max_shard_size="2MB", fsync=False)
    assert not queued.query()
    double(model, 1)
    handle.wait()
    double(wanted, 1)
    check_written(folder / "out", wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("staging", [None, "device", "host"])
def test_a_module_on_several_gpus_is_saved_and_loaded(folder, staging):
    model, wanted = make(layers=8), make(layers=8)
    for index, layer in enumerate(model.model.layers):
        layer.to(f"cuda:{index % 2}")
    for device in range(2):
        with torch.cuda.device(device):
            torch.cuda._sleep(500_000_000)
    double(model, 1)
    options = {} if staging is None else {"blocking": False, "staging": staging}
    saved = save_checkpoint(model, folder / "out", max_shard_size="2MB", fsync=False, **options)
    double(model, 1)
    if isinstance(saved, PendingSave):
        saved.wait()
    double(wanted, 1)
    check_written(folder / "out", wanted)
    for device in range(2):
        with torch.cuda.device(device):
            torch.cuda._sleep(500_000_000)
    load_checkpoint(model, folder / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), wanted.state_dict()[name])


def test_staging_where_the_device_has_no_room(folder, monkeypatch):
    model = sharded("gpu")

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StagedSink, "_take", refuse)
    with pytest.raises(Exception, match="no room"):
        Exporter(model).save(folder / "out", blocking=False, staging="device")
    handle = Exporter(model).save(folder / "out", blocking=False, staging="auto", max_shard_size="2MB")
    monkeypatch.undo()
    handle.wait()
    check_written(folder / "out", make())
