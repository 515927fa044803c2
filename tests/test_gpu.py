"""What only real devices show. Run by `bin/test-gpu`, under torchrun: every rank runs every test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from gpu_models import OFFLOAD, check_folder, check_tensors, make, sharded, shared_folder
from peft_models import merged_tensors, with_lora
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_export import Exporter, save_checkpoint
from fsdp_export.gather import Gather

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_group")]

folder = pytest.fixture(shared_folder)


def places(model: Any) -> list[tuple[str, int, bool]]:
    with torch.no_grad():
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.state_dict(keep_vars=True).values()]
    return [(str(tensor.device), tensor.data_ptr(), tensor.is_pinned()) for tensor in locals_]


def refuse_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the module was moved")

    monkeypatch.setattr(nn.Module, "_apply", refuse)


def test_the_old_sequence_crashes():
    """The case is real: verl#5995."""
    model = sharded("pinned")
    model.to("cuda")
    with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor on device"):
        model.state_dict()


def test_a_half_moved_module_is_exported_all_the_same(folder):
    model = sharded("pinned")
    model.to("cuda")
    check_tensors(model, make())
    check_folder(model, make(), folder)


@pytest.mark.parametrize("kind", ["pinned", "unpinned", "gpu", "some"])
def test_tensors_arrive_on_the_gpu_and_the_module_stays(kind, monkeypatch):
    model, expected = sharded(kind), make()
    before = places(model)
    refuse_to_move(monkeypatch)
    for bucket_bytes in (1, 300_000, None):
        check_tensors(model, expected, bucket_bytes=bucket_bytes)
    assert places(model) == before


@pytest.mark.parametrize("gather_all", [False, True], ids=["planned", "forced"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["pinned", "gpu", "some"])
def test_saved_files_equal_save_pretrained(folder, kind, tied, gather_all, monkeypatch):
    model = sharded(kind, tied=tied)
    before = places(model)
    expected = make(tied=tied)
    refuse_to_move(monkeypatch)
    check_folder(model, expected, folder, gather_all=gather_all)
    assert places(model) == before


def test_replicas_share(folder):
    check_folder(sharded("gpu", hsdp=True), make(), folder)
    check_tensors(sharded("gpu", hsdp=True), make())


@pytest.mark.parametrize("kind", ["pinned", "gpu"])
def test_shards_by_columns_are_gathered(folder, kind):
    model = sharded(kind, by_columns=True)
    if dist.get_world_size() > 1:
        assert Exporter(model).plan.gathered_steps
    check_folder(model, make(), folder)
    check_tensors(model, make(), bucket_bytes=300_000)


@pytest.mark.parametrize("policy", OFFLOAD.values(), ids=OFFLOAD)
def test_large_rows_that_do_not_divide(policy):
    """They are received where they belong, too."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = nn.ParameterList([torch.arange(num_rows * 16.0).view(num_rows, 16) for num_rows in (1_000_003, 900_001)])
    fully_shard(model, mesh=mesh, offload_policy=policy)
    if policy is OFFLOAD["gpu"]:
        model.cuda()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    delivered = dict(Exporter(model).tensors())
    num_bytes = sum(tensor.nbytes for tensor in delivered.values())
    blocks = num_bytes / dist.get_world_size() * (2 if dist.get_world_size() > 1 else 1)
    assert torch.cuda.max_memory_allocated() - before <= num_bytes + blocks + (8 << 20)  # the allocator rounds up
    for name, num_rows in (("0", 1_000_003), ("1", 900_001)):
        assert torch.equal(delivered[name].cpu(), torch.arange(num_rows * 16.0).view(num_rows, 16)), name


@pytest.mark.parametrize("kind", ["pinned", "gpu"])
def test_after_a_step_and_inside_an_unsharded_window(kind):
    model, expected = sharded(kind), make().cuda()
    tokens = torch.arange(64, device="cuda").view(2, 32)
    for one in (model, expected):
        one(input_ids=tokens, labels=tokens).loss.backward()
    before = {name: tensor.cpu() for name, tensor in Exporter(model).tensors()}
    wanted = make().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in before.items())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = {name: tensor.cpu() for name, tensor in Exporter(model).tensors()}
    gradients = {name: parameter.grad.cpu() for name, parameter in expected.named_parameters()}
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name] - 0.1 * gradients[name], rtol=1e-4, atol=1e-5)
    model.unshard()
    again = dict(Exporter(model).tensors())
    assert all(torch.equal(again[name].cpu(), tensor) for name, tensor in after.items())


def test_a_cast_on_the_device(folder):
    model, expected = sharded("gpu"), make().to(torch.bfloat16)
    check_folder(model, expected, folder, dtype="bfloat16")
    for name, tensor in Exporter(model, dtype="bf16").tensors():
        assert torch.equal(tensor.cpu(), expected.state_dict()[name])


def test_the_consumer_may_be_slow_and_keep_everything():
    """The next bucket is on its way while this one is read: nothing may be overwritten."""
    model, expected = sharded("gpu"), make()
    kept = {}
    for name, tensor in Exporter(model, bucket_bytes=200_000).tensors():
        torch.cuda._sleep(2_000_000)
        kept[name] = tensor.mul(2)
    for name, tensor in kept.items():
        assert torch.equal(tensor.cpu(), expected.state_dict()[name] * 2), name


def test_the_consumer_may_go_from_stream_to_stream():
    model, expected = sharded("gpu"), make()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    kept, walk = {}, Exporter(model, bucket_bytes=200_000).tensors()
    for index in range(len(expected.state_dict())):
        with torch.cuda.stream(streams[index % 3]):
            name, tensor = next(walk)
            tensor.record_stream(streams[index % 3])  # its bucket came on another one
            torch.cuda._sleep(2_000_000)
            kept[name] = tensor.mul(2)
            del tensor
    assert next(walk, None) is None
    torch.cuda.synchronize()
    for name, tensor in kept.items():
        assert torch.equal(tensor.cpu(), expected.state_dict()[name] * 2), name


def pending_bytes() -> int:
    """Return what was freed, and is kept for a stream that still uses it."""
    stats = torch.cuda.memory_stats()
    return int(stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"])


def test_a_walk_that_is_left_writes_into_no_memory_of_others(monkeypatch):
    """The next bucket is on its way by then, here a slow one."""
    model = sharded("gpu")
    launch, launched = Gather.launch, []

    def launch_slowly(gather: Gather) -> None:
        if launched:
            torch.cuda._sleep(5_000_000_000)
        launched.append(sum(tensor.nbytes for tensor in gather.outputs))
        launch(gather)

    monkeypatch.setattr(Gather, "launch", launch_slowly)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not pending_bytes()
    walk = Exporter(model, bucket_bytes=600_000).tensors()
    next(walk)
    walk.close()
    assert pending_bytes() >= (launched[1] if dist.get_world_size() > 1 else 0)
    others = [torch.ones(1 << size, device="cuda") for size in (10, 14, 17, 19) for _ in range((1 << 22) >> size)]
    torch.cuda.synchronize()
    assert len(launched) == 2
    assert all(bool((tensor == 1).all()) for tensor in others)
    monkeypatch.undo()
    check_tensors(model, make())


def test_device_memory_is_bounded_by_buckets():
    model = sharded("gpu")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bucket_bytes = 600_000
    largest = max(info.num_bytes for info in Exporter(model).plan.outputs)
    for _ in Exporter(model, bucket_bytes=bucket_bytes).tensors():
        pass
    assert torch.cuda.max_memory_allocated() - before <= 5 * max(bucket_bytes, largest)


def test_device_memory_is_bounded_by_buckets_of_experts():
    """The fused tensor of all experts is ten times as large as a bucket: verl#6691."""
    pytest.importorskip("transformers.core_model_loading")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 128, "num_experts_per_tok": 2}
    others = {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **others)).cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    fused = model.model.layers[0].mlp.experts.gate_up_proj
    bucket_bytes = fused.numel() * fused.element_size() // 10
    exporter = Exporter(model, bucket_bytes=bucket_bytes)
    assert exporter.plan.num_bytes > 20 * bucket_bytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    names = [name for name, _ in exporter.tensors()]
    assert sum(".experts." in name for name in names) == 2 * 3 * 128
    # Two buckets, the one whose last expert the loop still has, and what is sent and received in one piece.
    buckets = 2 + 1 + (1 + 1 / dist.get_world_size())
    assert torch.cuda.max_memory_allocated() - before <= buckets * bucket_bytes


@pytest.mark.parametrize("kind", OFFLOAD)
@pytest.mark.parametrize("model_kind", ["plain", "dora", "embeddings", "experts"])
def test_lora_is_merged_as_peft_does_on_the_device(folder, model_kind, kind):
    expected = merged_tensors(with_lora(model_kind).cuda())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = fully_shard(with_lora(model_kind), mesh=mesh, offload_policy=OFFLOAD[kind])
    tensors = dict(Exporter(model, bucket_bytes=20_000).tensors())
    assert tensors.keys() == expected.keys()
    assert _largest_differences(tensors, expected) == {}
    save_checkpoint(model, folder / "out", lora="merge", format="safetensors")
    if dist.get_rank() == 0:
        differences = _largest_differences(load_file(folder / "out" / "model.safetensors"), expected)
        # A rank multiplies the rows that it holds, for which cuBLAS may take another kernel than for all of them.
        assert max(differences.values(), default=0.0) < 1e-7


def _largest_differences(some, others):
    pairs = ((name, some[name].cpu(), others[name].cpu()) for name in others)
    return {name: (one - other).abs().max().item() for name, one, other in pairs if not torch.equal(one, other)}


def test_plain_tensors_that_differ(folder):
    model = nn.Linear(4, 4).cuda()
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    if dist.get_world_size() > 1:
        with pytest.raises(Exception, match="differ between ranks that have copies of them: weight"):
            save_checkpoint(model, folder / "out")


def test_a_rank_that_fails_ends_all_and_the_group_lives(folder):
    model = sharded("gpu")
    last = dist.get_world_size() - 1
    with pytest.raises(Exception, match=f"rank {last}.*stopped early|stopped here"):  # noqa: PT012
        for index, _ in enumerate(Exporter(model, bucket_bytes=1).tensors()):
            if dist.get_rank() == last and index == 3:
                raise ValueError("stopped here")
    dist.all_reduce(torch.ones(1, device="cuda"))
    check_tensors(model, make())
