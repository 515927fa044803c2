"""Whatever layout a trainer left goes into a module, on another mesh than it was saved on; adapters of PEFT, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import put_together
from dcp_folders import save as save_with_dcp
from hub_models import hub_model, trained
from loading import assert_holds, on_meta, sharded_oracle, snapshot, spoiled
from models import hf_model, local, shard, tiny
from peft_models import draw, quiet, with_lora
from rank_folders import save_as_accelerate, save_as_verl
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import StateDictType

from fsdp_export import load_checkpoint, save_checkpoint
from fsdp_export.errors import SourceError

FUSED = "qwen3-moe"


def moe() -> nn.Module:
    model: nn.Module = trained(hub_model(FUSED))
    return model


def save_in_all_layouts(folder: Path) -> None:
    """Save what torch and trainers save, under the names that modules have: experts stay fused."""
    for name, make in {"tiny": tiny, "moe": moe}.items():
        model = shard(make(), "1d", 3)
        save_with_dcp(folder / name / "dcp", model.state_dict())
        save_with_dcp(folder / name / "dcp-below", {"model": model.state_dict(), "step": 3})
        save_as_verl(folder / name / "run" / "global_step_7" / "actor", model)
        save_as_accelerate(folder / name / "accelerate", model, StateDictType.SHARDED_STATE_DICT)
        full = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in model.state_dict().items()
        }
        if torch.distributed.get_rank() == 0:
            (folder / name / "torch").mkdir(parents=True)
            torch.save(full, folder / name / "torch" / "pytorch_model.bin")
        save_checkpoint(model, folder / name / "ours", fsync=False)


def test_every_layout_goes_into_another_mesh(tmp_path: Path) -> None:
    run_ranks(save_in_all_layouts, 3, tmp_path, timeout=120)
    layouts = sorted(path.name for path in (tmp_path / "moe").iterdir())
    assert layouts == ["accelerate", "dcp", "dcp-below", "ours", "run", "torch"]

    def on_rank() -> None:
        for name, make in {"tiny": tiny, "moe": moe}.items():
            for mesh in ("1d", "dim1"):
                expected = sharded_oracle(make, mesh, 2)
                model = shard(make(), mesh, 2)
                for layout in layouts:
                    report = load_checkpoint(spoiled(model), tmp_path / name / layout)
                    assert_holds(model, expected)
                    assert not report.missing
                    assert not report.unexpected

    run_ranks(on_rank, 2, timeout=120)


def test_a_chunk_that_ends_too_early_is_found_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(lambda: save_with_dcp(tmp_path / "dcp", shard(tiny(), "1d", 2).state_dict()), 2)
    file = tmp_path / "dcp" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[-60:] = bytes(60)  # the directory of the last chunk, of which opening reads the first one alone
    file.write_bytes(data)
    model = tiny()
    before = snapshot(model)
    with pytest.raises(SourceError):
        load_checkpoint(model, tmp_path / "dcp")
    assert_holds(model, before)


def test_copies_that_differ_are_found_before_anything_changes(tmp_path: Path) -> None:
    for rank in range(2):
        tensors = tiny().state_dict()
        tensors["two_rows"][1] += rank
        put_together(tmp_path, tensors, only_rank=rank)
    model = tiny()
    before = snapshot(model)
    with pytest.raises(SourceError, match="a tensor of which ranks saved different copies for 'two_rows'"):
        load_checkpoint(model, tmp_path)
    assert_holds(model, before)


@pytest.mark.parametrize("kind", ["plain", "experts", "saved"])
def test_a_model_of_peft_loads_its_base_its_adapter_or_both(kind: str, tmp_path: Path) -> None:
    with quiet():
        model: Any = with_lora(kind)
        plain = with_lora(kind).get_base_model() if kind == "plain" else None
    save_checkpoint(model, tmp_path / "adapter", fsync=False)
    torch.save(model.state_dict(), tmp_path / "all.pt")

    def on_rank() -> None:
        with quiet():
            other: Any = with_lora(kind)
        draw(other, seed=7)
        shard(other, "1d", 2)
        before = snapshot(other)
        load_checkpoint(other, tmp_path / "adapter")
        with quiet():
            known = snapshot(shard(with_lora(kind), "1d", 2))
        assert before.keys() == known.keys()
        assert any(not torch.equal(before[name], known[name]) for name in known)
        assert_holds(other, known)
        load_checkpoint(spoiled(other), tmp_path / "all.pt")
        assert_holds(other, known)

    run_ranks(on_rank, 2)
    assert plain is None or "lora" in " ".join(plain.state_dict())


def test_an_adapter_that_another_scale_was_trained_with_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with quiet():
        model: Any = with_lora("plain")
    save_checkpoint(model, tmp_path, fsync=False)
    load_checkpoint(model, tmp_path)
    assert not caplog.records
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    alpha = config["lora_alpha"]
    path.write_text(json.dumps(config | {"lora_alpha": 2 * alpha, "alpha_pattern": {"q_proj": 3}}))
    load_checkpoint(model, tmp_path)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(": the adapter")[0] for message in told] == [
        f"{path} says lora_alpha={2 * alpha}, and the model has {alpha}",
        f"{path} says alpha_pattern={{'q_proj': 3}}, and the model has {{}}",
    ]
    assert all(message.endswith("Give the model's LoraConfig the same") for message in told)
    caplog.clear()
    path.write_text("{")
    load_checkpoint(model, tmp_path)
    assert not caplog.records


def test_the_base_model_goes_below_an_adapter_that_stays(tmp_path: Path) -> None:
    with quiet():
        base: Any = with_lora("plain")
    with torch.no_grad(), base.disable_adapter():
        expected = base(torch.tensor([[1, 2, 3]])).logits
    tensors = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): value
        for name, value in base.state_dict().items()
        if "lora_" not in name
    }
    torch.save(tensors, tmp_path / "base.pt")
    with quiet():
        model: Any = with_lora("plain")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" not in name:
                value.fill_(1)
    adapter = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    load_checkpoint(model, tmp_path / "base.pt")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in adapter.items())
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected)


def test_a_model_inside_of_another_module_is_loaded_below_its_name(tmp_path: Path) -> None:
    class Rewards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = hub_model(FUSED)
            self.score = nn.Linear(16, 1)

    torch.manual_seed(5)
    save_checkpoint(Rewards(), tmp_path / "rewards", fsync=False)
    expected = snapshot(spoiled(Rewards()))
    torch.manual_seed(5)
    expected = snapshot(Rewards())
    model = spoiled(Rewards())
    load_checkpoint(model, tmp_path / "rewards")
    assert_holds(model, expected)


def test_what_fsdp_offloads_is_materialized_in_host_memory(tmp_path: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    save_checkpoint(hf_model("llama-tied"), tmp_path / "llama", fsync=False)

    def on_rank() -> None:
        policy = CPUOffloadPolicy(pin_memory=False)
        model: Any = shard(on_meta(lambda: hf_model("llama-tied")), "1d", 3, offload_policy=policy)
        load_checkpoint(model, tmp_path / "llama")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_holds(model, sharded_oracle(lambda: hf_model("llama-tied"), "1d", 3))
        # FSDP2 gathers from memory of its own, which must be the one that was filled.
        tokens = torch.tensor([[1, 2, 3]])
        expected = hf_model("llama-tied")(tokens).logits
        assert torch.allclose(model(tokens).logits, expected, atol=1e-6)
        assert all(local(parameter).device.type == "cpu" for parameter in model.parameters())

    run_ranks(on_rank, 3)


def test_a_sharded_table_that_is_not_saved_is_computed_on_every_rank(tmp_path: Path) -> None:
    class Table(nn.Module):
        _keys_to_ignore_on_save = ("weights",)

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.arange(21.0).view(7, 3), requires_grad=False)
            self.linear = nn.Linear(3, 3)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weights.copy_(torch.arange(21.0).view(7, 3))

    torch.manual_seed(0)
    torch.save(nn.Linear(3, 3).state_dict(prefix="linear."), tmp_path / "table.pt")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Table()

    def on_rank() -> None:
        model = shard(on_meta(Table), "1d", 3)
        load_checkpoint(model, tmp_path / "table.pt")
        assert_holds(model, sharded_oracle(make, "1d", 3))
        kept = shard(make(), "1d", 3)
        assert load_checkpoint(kept, tmp_path / "table.pt").num_tensors == 2
        assert_holds(kept, sharded_oracle(make, "1d", 3))

    run_ranks(on_rank, 3)


@pytest.mark.parametrize("reshards", [False, True])
def test_a_module_that_has_run_runs_with_what_was_loaded(reshards: bool, tmp_path: Path) -> None:
    save_checkpoint(hf_model("llama"), tmp_path / "llama", fsync=False)

    def on_rank() -> None:
        tokens = torch.tensor([[1, 2, 3]])
        model: Any = shard(hf_model("llama"), "1d", 2, reshard_after_forward=reshards)
        expected = model(tokens).logits.detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model(tokens)
        load_checkpoint(model, tmp_path / "llama")
        assert torch.equal(model(tokens).logits, expected)

    run_ranks(on_rank, 2)
