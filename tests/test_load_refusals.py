"""What would be a wrong model without a word: refused on every rank, before anything changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hub_models import hub_model
from loading import assert_holds, sharded_oracle, snapshot, spoiled
from models import shard, tiny
from peft_models import quiet, with_lora
from rank_folders import save_as_verl
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_export import ExportError, load_checkpoint, save_checkpoint
from fsdp_export.errors import DisagreementError, RankError, SourceError, UsageError
from fsdp_export.fence import heartbeat
from fsdp_export.loading.target import Target
from fsdp_export.opening import open_checkpoint
from fsdp_export.sources.archive import DataFiles

Tensors = dict[str, torch.Tensor]


def moved(by: float) -> nn.Module:
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)
    return model


def refused(model: nn.Module, path: Path, kind: type[ExportError] = SourceError, **options: Any) -> str:
    before = snapshot(model)
    with pytest.raises(kind) as caught:
        load_checkpoint(model, path, **options)
    assert_holds(model, before)
    return str(caught.value)


def holding(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_ranks_that_would_read_other_steps_are_refused(tmp_path: Path) -> None:
    def save() -> None:
        for step in (6, 7):
            save_as_verl(tmp_path / "run" / f"global_step_{step}" / "actor", shard(moved(step), "1d", 2))

    run_ranks(save, 2)
    for step in (6, 7):
        save_checkpoint(moved(step), tmp_path / f"step-{step}" / "weights", fsync=False)
    open_file = os.open

    def open_older(path: Any, *arguments: Any, **options: Any) -> int:
        if "global_step_7" in str(path) and str(path).endswith(".pt"):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    def on_rank() -> list[str]:
        rank = dist.get_rank()
        os.open = open_older if rank else open_file  # of this process alone
        model = shard(tiny(), "1d", 2)
        newest = refused(model, tmp_path / "run", DisagreementError)
        named = refused(model, tmp_path / f"step-{6 + rank}" / "weights", DisagreementError)
        with pytest.raises(DisagreementError) as caught:
            open_checkpoint(tmp_path / "run", ranks=(0, 1), rank=rank)
        return [newest, named, str(caught.value)]

    newest, named, opened = zip(*run_ranks(on_rank, 2), strict=True)
    assert newest[0] == newest[1] == opened[0] == opened[1]
    assert named[0] == named[1]
    assert newest[0].startswith(
        "the ranks would read checkpoints with different values: "
        f"expected as on rank 0: {tmp_path}/run/global_step_7/actor, "
        f"found on rank 1: {tmp_path}/run/global_step_6/actor. Give"
    )
    assert f"{tmp_path}/step-6/weights, found on rank 1: {tmp_path}/step-7/weights" in named[0]


def test_copies_of_one_checkpoint_in_other_places_are_read(tmp_path: Path) -> None:
    for host in range(2):
        save_checkpoint(tiny(), tmp_path / f"host-{host}", fsync=False)

    def on_rank() -> None:
        model = spoiled(shard(tiny(), "1d", 2))
        load_checkpoint(model, tmp_path / f"host-{dist.get_rank()}")
        assert_holds(model, sharded_oracle(tiny, "1d", 2))

    run_ranks(on_rank, 2)


def with_a_hook(change: Callable[[Tensors], Tensors], **tensors: torch.Tensor) -> nn.Module:
    module = holding(**(tensors or {"w": torch.ones(4, 6), "b": torch.zeros(6)}))
    module._register_state_dict_hook(lambda _, tensors, *_others: tensors.update(change(tensors)))
    return module


COPY = "a copy in the state dict of the module, into which nothing can be loaded, for 'w': found "
FLAT = torch.zeros(40)
MEMORY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook that changes values": (
        lambda: with_a_hook(lambda tensors: {"w": tensors["w"] * 2}),
        COPY + "other values once these were loaded. Take away the hook that makes it, or register",
    ),
    "hook that changes names": (
        lambda: with_a_hook(lambda tensors: {"w": tensors.pop("v") + 0}, v=torch.ones(4, 6), b=torch.zeros(6)),
        COPY + "a name that load_state_dict does not know",
    ),
    "expanded": (
        lambda: holding(w=torch.zeros(1, 6).expand(4, 6), b=torch.zeros(6)),
        "elements that share memory for 'w': found shape [4, 6] with strides [0, 1]",
    ),
    "windows": (
        lambda: holding(w=torch.zeros(9).unfold(0, 6, 1), b=torch.zeros(6)),
        "elements that share memory for 'w': found shape [4, 6] with strides [1, 1]",
    ),
    "overlap": (
        lambda: holding(w=FLAT[:24].view(4, 6), b=FLAT[20:26]),
        "memory of two tensors for 'b': found some that 'w' has, too",
    ),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_cannot_take_the_values_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = MEMORY[kind]
    save_file({"w": torch.randn(4, 6), "b": torch.randn(6)}, tmp_path / "model.safetensors")
    assert refused(make(), tmp_path).startswith(message)


def test_what_hooks_copy_or_a_flag_negates_goes_through_the_modules_own_loading(tmp_path: Path) -> None:
    stored = {"w": torch.randn(4, 6), "b": torch.randn(6)}
    save_file(stored, tmp_path / "model.safetensors")
    model = with_a_hook(lambda tensors: {name: tensor.clone() for name, tensor in tensors.items()})
    load_checkpoint(model, tmp_path)
    assert_holds(model, stored)
    negative = torch.zeros(6, dtype=torch.complex64).conj().imag
    load_checkpoint(holding(w=torch.zeros(4, 6), b=negative), tmp_path)
    assert torch.equal(negative, stored["b"])


def test_parts_of_one_memory_that_do_not_meet_are_filled(tmp_path: Path) -> None:
    stored = {"w": torch.randn(4, 6), "b": torch.randn(4, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    flat = torch.zeros(4, 8)
    load_checkpoint(holding(w=flat[:, :6], b=flat[:, 6:]), tmp_path)
    assert torch.equal(flat, torch.cat([stored["w"], stored["b"]], dim=1))
    one = torch.zeros(8, 4).t()[:, ::2]
    load_checkpoint(holding(w=torch.zeros(6, 4).t(), b=one[:, :2]), tmp_path)
    assert torch.equal(one[:, :2], stored["b"])


def test_one_memory_under_two_names_takes_but_equal_values(tmp_path: Path) -> None:
    stored = torch.randn(4, 6)
    save_file({"w": stored, "b": stored.clone()}, tmp_path / "model.safetensors")
    shared = torch.zeros(4, 6)
    model = holding(w=shared, b=shared.view(-1).view(4, 6))
    load_checkpoint(model, tmp_path)
    assert torch.equal(shared, stored)
    save_file({"w": stored, "b": stored + 1}, tmp_path / "model.safetensors")
    assert refused(model, tmp_path).startswith("two values for weights that the model has tied for 'w'")


EXPERT = "model.layers.0.mlp.experts.{}.{}.weight"
KINDS = ("up_proj", "gate_proj", "down_proj")


def renumbered(tensors: Tensors) -> None:
    for kind in KINDS:
        tensors[EXPERT.format(9, kind)] = tensors.pop(EXPERT.format(3, kind))


def of_integers(tensors: Tensors) -> None:
    tensors[EXPERT.format(1, "up_proj")] = tensors[EXPERT.format(1, "up_proj")].int()


def of_half(tensors: Tensors) -> None:
    tensors[EXPERT.format(1, "up_proj")] = tensors[EXPERT.format(1, "up_proj")].bfloat16()


def transposed(tensors: Tensors) -> None:
    tensors[EXPERT.format(1, "up_proj")] = tensors[EXPERT.format(1, "up_proj")].t().contiguous()


def without_one(tensors: Tensors) -> None:
    del tensors[EXPERT.format(1, "up_proj")]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (renumbered, f"made of {EXPERT.format(9, 'down_proj')}, without {EXPERT.format(3, 'down_proj')}"),
        (of_integers, f"expected float32, found int32 in {EXPERT.format(1, 'up_proj')}"),
        (of_half, f"expected float32, found bfloat16 in {EXPERT.format(1, 'up_proj')}"),
        (transposed, f"{EXPERT.format(1, 'up_proj')}: expected [8, 16], found [16, 8]"),
        (without_one, f", without {EXPERT.format(1, 'up_proj')}"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_expert_that_is_none_of_the_module_is_named(
    change: Callable[[Tensors], None], found: str, tmp_path: Path
) -> None:
    save_checkpoint(hub_model("qwen3-moe"), tmp_path, fsync=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert found in refused(hub_model("qwen3-moe"), tmp_path, strict=False, cast=False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whatever_is_raised_later_says_that_the_model_is_loaded_in_part(num_ranks: int, tmp_path: Path) -> None:
    save_checkpoint(tiny(), tmp_path, fsync=False)

    def on_rank() -> str:
        def fail(_: int) -> None:
            if dist.get_rank() == num_ranks - 1:
                raise MemoryError("no more")

        with pytest.raises(ExportError) as caught:
            load_checkpoint(shard(tiny(), "1d", num_ranks), tmp_path, delivered=fail)
        return str(caught.value)

    (text,) = set(run_ranks(on_rank, num_ranks))
    assert text.startswith("the model is loaded in part and must not be used: ")
    assert text.endswith("MemoryError: no more")
    assert ("rank 1 (" in text) == (num_ranks == 2)


def test_a_rank_that_dies_leaves_models_that_say_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.15)
    save_checkpoint(tiny(), tmp_path, fsync=False)

    def on_rank() -> str:
        def die(_: int) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankError) as caught:
            load_checkpoint(shard(tiny(), "1d", 2), tmp_path, delivered=die)
        return str(caught.value)

    text, _ = run_ranks(on_rank, 2, expect_death=[1])
    assert text.startswith("the model is loaded in part and must not be used: rank 1 (")


@pytest.mark.parametrize("what", ["adapter", "base.pt"])
def test_a_model_whose_adapters_are_merged_is_refused(what: str, tmp_path: Path) -> None:
    with quiet():
        model: Any = with_lora("plain")
    save_checkpoint(model, tmp_path / "adapter", fsync=False)
    base = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
    torch.save({name: value for name, value in base.items() if "lora_" not in name}, tmp_path / "base.pt")
    with quiet():
        model.merge_adapter()
    assert refused(model, tmp_path / what, UsageError).endswith("Call unmerge_adapter() first.")
    with quiet():
        model.unmerge_adapter()
    load_checkpoint(model, tmp_path / what)


def test_a_file_that_gets_shorter_is_told_with_the_bytes_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(10))
    with pytest.raises(SourceError, match=r"a truncated data file in .*data: expected 108 bytes, found 10\."):
        DataFiles(tmp_path).read("data", 100, 8)


def test_an_empty_table_on_meta_needs_no_values(tmp_path: Path) -> None:
    model: Any = holding(w=torch.zeros(2))
    model.register_buffer("cache", torch.empty(0, 3, device="meta"), persistent=False)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    load_checkpoint(model, tmp_path)
    assert (model.cache.device.type, model.w.tolist()) == ("cpu", [1, 1])


def test_names_that_a_terminal_would_obey_are_spelled_out(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "\x1b[31m\n": torch.ones(1), "": torch.ones(1)}, tmp_path / "model.safetensors")
    assert r"2 unexpected: '', '\x1b[31m\n'" in refused(holding(w=torch.zeros(2)), tmp_path)


def test_the_names_of_a_module_are_not_collected_for_every_tensor(tmp_path: Path, monkeypatch) -> None:
    save_checkpoint(tiny(), tmp_path, fsync=False)
    collect, times = Target.names.fget, []  # type: ignore[attr-defined]

    def counted(self: Target) -> set[str]:
        times.append(1)
        return collect(self)

    monkeypatch.setattr(Target, "names", property(counted))
    load_checkpoint(tiny(), tmp_path)
    assert 0 < len(times) < 5  # of 14 tensors: what is done for each would take minutes for 100,000
