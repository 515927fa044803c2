"""Ranks that would export different things are told so before anything is gathered."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter, MemorySink, agreement
from fsdp_export.agreement import fingerprint
from fsdp_export.errors import DisagreementError
from fsdp_export.sinks.files import FileSink

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64]


def parameters(**shapes: tuple[int, ...]) -> nn.Module:
    """Return a module with these parameters in this order, sharded over all ranks."""
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def of(shape: str, name: str) -> str:
    return (
        f"{name} {shape} torch.float32 buffer=False mesh=(2,) ranks={{}} cuts=((0, 0),) -> {name} {shape} torch.float32"
    )


MODELS: list[tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], int, str, str]] = [
    ({"a": (4, 4), "b": (4, 4)}, {"b": (4, 4), "a": (4, 4)}, 0, of("[4, 4]", "a"), of("[4, 4]", "b")),
    ({"a": (4, 4), "b": (4, 4)}, {"a": (4, 4)}, 1, of("[4, 4]", "b"), "nothing"),
    ({"a": (4,)}, {"a": (4,), "z": (4,)}, 1, "nothing", of("[4]", "z")),
    ({"a": (4,), "b": (4, 2)}, {"a": (4,), "b": (2, 4)}, 1, of("[4, 2]", "b"), of("[2, 4]", "b")),
]


@pytest.mark.parametrize(
    ("first", "second", "position", "expected", "found"), MODELS, ids=["swapped", "fewer", "more", "shape"]
)
def test_different_plans_name_the_first_tensor(first, second, position, expected, found, tmp_path):
    def check() -> str:
        model = parameters(**(second if dist.get_rank() else first))
        exporter = Exporter(model)
        for export in (lambda: next(exporter.tensors()), lambda: exporter.save(tmp_path / "out")):
            with pytest.raises(DisagreementError) as caught:
                export()
        return str(caught.value).replace(next(exporter.plan.lines).split("ranks=")[1].split(" ")[0], "{}")

    message = (
        f"the ranks would export different tensors, first at position {position}: expected as on rank 0: {expected}, "
        f"found on rank 1: {found}. Build the same model, in the same order, on every rank."
    )
    assert run_ranks(check, 2) == [message] * 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucket_bytes": 100},
            "on rank 0: .* bucket_bytes=33554432 .* on rank 2: .* bucket_bytes=100 ",
        ),
        (
            {"dtype": "bf16"},
            r"at position 0: expected .* -> a \[4, 4\] torch.float32, found .* -> a \[4, 4\] torch.bfloat16",
        ),
        ({"exclude": ["a"]}, "at position 0: expected as on rank 0: a .* found on rank 2: b "),
    ],
    ids=["bucket", "dtype", "exclude"],
)
def test_different_options(options, message):
    def check() -> None:
        exporter = Exporter(parameters(a=(4, 4), b=(4, 4)), **(options if dist.get_rank() == 2 else {}))
        with pytest.raises(DisagreementError, match=message):
            next(exporter.tensors())

    run_ranks(check, 3)


def test_sinks_that_deliver_differently(tmp_path):
    """A real sink on one rank and a stand-in on the others would wait for each other for ever."""

    def check() -> None:
        sink = MemorySink() if dist.get_rank() else FileSink(tmp_path / "out")
        with pytest.raises(DisagreementError, match=r"delivery=once .* found on rank 1: delivery=everyone "):
            Exporter(parameters(a=(4, 4))).send(sink)

    run_ranks(check, 2)
    assert not (tmp_path / "out").exists()


def test_forcing_the_gather_on_some_ranks_only(tmp_path):
    def check() -> None:
        exporter = Exporter(parameters(a=(4, 4)))
        with pytest.raises(
            DisagreementError, match=r"different pieces: .*gather_all=False, found .*gather_all=True. Give"
        ):
            exporter.save(tmp_path, gather_all=dist.get_rank() == 1)

    run_ranks(check, 2)


class Experts(nn.Module):
    """Parameters that nothing shards and every rank has of its own, beside one that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(3, 3, bias=False)
        self.router = nn.Parameter(torch.randn(2, 3))
        self.experts = nn.Parameter(torch.zeros(2, 3, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def shard(self) -> nn.Module:
        own = {self.router, self.experts, self.scale}
        fully_shard(self, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=own)
        return self


def drift(model: Any) -> None:
    with torch.no_grad():
        model.experts[1, 2, 2] += 1
        model.scale.add_(1)


def test_parameters_that_drifted_apart_are_refused(tmp_path):
    def check() -> str:
        torch.manual_seed(0)
        model = Experts()
        model.shard()
        if dist.get_rank() == 2:
            drift(model)
        for exporter in (Exporter(model, exclude=["experts", "scale"]), Exporter(model, include=["router"])):
            assert "router" in dict(exporter.tensors())
        with pytest.raises(DisagreementError) as caught:
            Exporter(model).save(tmp_path / "out")
        return str(caught.value)

    message = (
        "parameters differ between ranks that have copies of them: experts, scale. "
        "Broadcast them from one rank first; experts that live on one rank each must be DTensors."
    )
    assert run_ranks(check, 3) == [message] * 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bucket_bytes", [1, 30, None], ids=["byte", "some", "default"])
@pytest.mark.parametrize("gather_all", [False, True], ids=["planned", "forced"])
def test_of_buffers_that_differ_all_come_whole_from_the_first_rank(gather_all, bucket_bytes, tmp_path, caplog):
    """Statistics of one BatchNorm must not be mixed from several."""

    def check() -> None:
        model = nn.Sequential(nn.BatchNorm1d(9), nn.BatchNorm1d(40))
        for name, buffer in model.named_buffers():
            buffer.fill_(100 * dist.get_rank() + len(name))
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        Exporter(model, bucket_bytes=bucket_bytes).save(tmp_path / "out", gather_all=gather_all, fsync=False)
        saved = load_file(tmp_path / "out" / "model.safetensors")
        for name, buffer in model.named_buffers():
            assert torch.equal(saved[name], torch.full_like(buffer, len(name))), name
        names = "0.num_batches_tracked, 0.running_mean, 0.running_var, 1.num_batches_tracked, 1.running_mean and 1 more"
        assert f"buffers differ between ranks, that of the first rank is exported: {names}" in caplog.text

    run_ranks(check, 3)


def random_bytes(chance: random.Random, size: int) -> torch.Tensor:
    return torch.tensor([chance.randrange(256) for _ in range(size)], dtype=torch.uint8)


@pytest.mark.parametrize("chunk_bytes", [8, 64, 64 << 20])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 63, 200])
def test_fingerprint_tells_every_byte_and_every_order(size, chunk_bytes, monkeypatch):
    monkeypatch.setattr(agreement, "_CHUNK_BYTES", chunk_bytes)
    data = random_bytes(random.Random(size), size)
    original = fingerprint(data)
    assert fingerprint(data.clone()) == original
    seen = {original}
    for index in range(size):
        changed = data.clone()
        changed[index] ^= 1 + index % 255
        seen.add(fingerprint(changed))
    words = data[: size // 8 * 8].reshape(-1, 8)
    swaps = [(i, j) for i in range(len(words)) for j in range(i) if not torch.equal(words[i], words[j])]
    for i, j in swaps:
        swapped = data.clone()
        swapped[8 * i : 8 * i + 8], swapped[8 * j : 8 * j + 8] = words[j], words[i]
        seen.add(fingerprint(swapped))
    assert len(seen) == 1 + size + len(swaps)


def test_fingerprint_of_two_flipped_signs():
    values = torch.arange(64.0)
    flipped = values.clone()
    flipped[[1, 13]] *= -1
    assert fingerprint(flipped) != fingerprint(values)


def test_fingerprint_of_a_mask_that_moved():
    masks = torch.zeros(2, 4096, dtype=torch.bool)
    masks[0, 7] = masks[1, 1031] = True
    assert fingerprint(masks[0]) != fingerprint(masks[1])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda tensor: torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].reshape(tensor.shape),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fingerprint_sees_values_and_not_where_they_lie(layout, dtype):
    size = 5 * 7 * dtype.itemsize
    data = random_bytes(random.Random(0), size)
    tensor = (data % 2 if dtype == torch.bool else data).view(dtype).reshape(5, 7)
    assert fingerprint(LAYOUTS[layout](tensor)) == fingerprint(tensor)


def test_fingerprint_of_nothing_and_of_one():
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(0))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
