"""Rows of what a plan makes, asked for in any order, against what transformers, PEFT and an adapter make of it all."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adapters import Adapter, Model
from dcp_folders import save
from hub_models import hub_model, trained
from peft_models import merged_tensors, quiet, with_lora
from safetensors.torch import load_file

from fsdp_export import compare_checkpoints, export_checkpoint
from fsdp_export.opening import open_checkpoint
from fsdp_export.rows import PlannedRows


def fused_experts(folder):
    model = trained(hub_model("qwen3-moe"))
    save(folder / "run", model.state_dict())
    model.save_pretrained(folder)
    return {"source": folder / "run"}, load_file(folder / "model.safetensors")


def of_a_trainer(folder):
    """Among others a tensor that is permuted, and one that is joined, which only the whole of their inputs makes."""
    save(folder / "run", Model().state_dict())
    return {"source": folder / "run", "adapter": Adapter()}, Adapter().to_hf(Model().state_dict())


def with_lora_in_it(kind):
    def make(folder):
        model = with_lora(kind)
        torch.save(model.state_dict(), folder / "model.pt")
        model.peft_config["default"].save_pretrained(folder)
        model.get_base_model().config.save_pretrained(folder / "huggingface")
        return {"source": folder / "model.pt"}, merged_tensors(model)

    return make


MAKERS = {
    "fused-experts": fused_experts,
    "trainer": of_a_trainer,
    "lora": with_lora_in_it("plain"),
    "lora-of-experts": with_lora_in_it("experts"),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_rows_are_those_of_what_is_made_of_all(kind, dtype, tmp_path):
    options, expected = MAKERS[kind](tmp_path)
    opened = open_checkpoint(**options, dtype=dtype or "keep")
    rows = PlannedRows(opened.exporter.plan, opened.source)
    assert {info.name for info in rows.specs} == expected.keys()
    assert rows.is_concurrent == (kind == "fused-experts")
    draw, wanted = random.Random(0), []
    for info in rows.specs:
        cuts = sorted(draw.choices(range(info.num_rows + 1), k=2))
        wanted += [(info, 0, info.num_rows), *([(info, *cuts)] if info.shape and cuts[0] < cuts[1] else [])]
    draw.shuffle(wanted)

    def check(ask):
        info, first, stop = ask
        tensor = expected[info.name] if dtype is None or info.dtype != dtype else expected[info.name].to(dtype)
        assert torch.equal(rows.rows(info, first, stop), tensor[first:stop] if tensor.dim() else tensor)

    if rows.is_concurrent:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(check, wanted))
    else:
        list(map(check, wanted))
    rows.close()
    check(wanted[0])  # files open again


def test_what_needs_whole_tensors_is_made_once(tmp_path):
    options, expected = of_a_trainer(tmp_path)
    opened = open_checkpoint(**options)
    rows = PlannedRows(opened.exporter.plan, opened.source)
    adapter = options["adapter"]
    adapter.calls.clear()
    (joined, other) = (info for info in rows.specs if info.name.endswith(".qk.weight"))
    for row in range(joined.num_rows):
        assert torch.equal(rows.rows(joined, row, row + 1), expected[joined.name][row : row + 1])
    assert len(adapter.calls) == 1
    rows.rows(other, 0, 1)
    rows.rows(joined, 0, 1)
    assert len(adapter.calls) == 3  # one step at a time is kept


@pytest.mark.parametrize("kind", ["trainer", "lora", "lora-of-experts"])
def test_what_is_computed_equals_what_was_exported(kind, tmp_path):
    options, _ = MAKERS[kind](tmp_path)
    source, adapter = options["source"], options.get("adapter")
    export_checkpoint(source, tmp_path / "out", adapter=adapter, fsync=False)
    assert compare_checkpoints(source, tmp_path / "out", adapter=adapter).is_equal
    if adapter is None:
        assert compare_checkpoints(tmp_path / "out", source).is_equal
        assert compare_checkpoints(source, source).is_equal


def test_adapters_of_peft_are_compared(tmp_path):
    model = with_lora("plain")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with quiet():
        model.save_pretrained(tmp_path / "adapter")
    comparison = compare_checkpoints(tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors")
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert (comparison.is_equal, comparison.num_tensors) == (True, len(stored))
    model.peft_config["default"].save_pretrained(tmp_path)
    assert compare_checkpoints(tmp_path / "model.pt", tmp_path / "adapter", lora="adapter").is_equal
    name = next(name for name in model.state_dict() if "lora_B" in name)
    with torch.no_grad():
        model.state_dict()[name][0, 0] += 1
    torch.save(model.state_dict(), tmp_path / "model.pt")
    comparison = compare_checkpoints(tmp_path / "model.pt", tmp_path / "adapter", lora="adapter")
    assert [each.name for each in comparison.differences] == [name.replace(".default", "")]
