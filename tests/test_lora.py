"""Checkpoints that hold nothing but a LoRA adapter become what PEFT loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from click.testing import CliRunner
from hf_folders import write_shard
from hub_folders import new_tokenizer, write_hub_folder
from lora_folders import KINDS, assert_refused, load, logits, on_disk, peft_model, record, save_in_every_layout
from models import hf_model
from ranks import run_ranks
from refused.lora import REFUSED, Maker
from safetensors.torch import load_file, save_file

from fsdp_export import export_checkpoint
from fsdp_export.cli import main
from fsdp_export.errors import ExportError, SinkError
from fsdp_export.opening import open_checkpoint

WRITTEN = {"adapter_model.safetensors", "adapter_config.json"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The state dict of a plain adapter, in a file, and what verl writes down of it."""
    folder = tmp_path_factory.mktemp("plain")
    model = peft_model("plain")
    torch.save(on_disk(model), folder / "pytorch_model_fsdp.bin")
    record(folder, model)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_says_the_same_when_peft_has_loaded_it(kind, tmp_path):
    run_ranks(save_in_every_layout, 2, tmp_path, kind)
    model = peft_model(kind)
    model.peft_config["default"].save_pretrained(tmp_path / "sharded" / "checkpoint-3")
    record(tmp_path / "full" / "checkpoint-3", model)
    said, tensors = logits(model), on_disk(model)
    assert not torch.allclose(said, logits(hf_model("llama")), atol=1e-3)
    for layout in ["sharded", "full", *(["verl"] if kind != "saved" else [])]:
        out = tmp_path / "out" / layout
        report = export_checkpoint(tmp_path / layout, out, verify=True)
        assert report.files.keys() == WRITTEN
        written = load_file(out / "adapter_model.safetensors")
        # Embeddings that have an adapter are stored too where PEFT made the state dict.
        expected = {name for name in tensors if layout == "sharded" or ".base_layer." not in name}
        assert written.keys() == expected
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
        assert torch.equal(logits(load(out)), said)


def export_together(source, out):
    rank = dist.get_rank()
    open_checkpoint(source, ranks=(0, 1), rank=rank).save(out)


def test_ranks_that_share_the_writing_write_the_same(plain, tmp_path):
    run_ranks(export_together, 2, plain, tmp_path / "two")
    export_checkpoint(plain, tmp_path / "one")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def call(*arguments, code=0):
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="fsdp-export")
    assert result.exit_code == code, result.output
    return result


def test_the_command_says_that_it_is_an_adapter_and_where_all_came_from(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, "run/step-5")
    new_tokenizer().save_pretrained("run/step-5/huggingface")
    found, tokenizer, *notes, wrote = call("run", "--out", "out").stdout.splitlines()
    summary = "8 tensors, 1.79 kB, float32"
    assert (
        found == f"found run/step-5: LoRA adapter of rank 4 on 4 modules, state dict pytorch_model_fsdp.bin, {summary}"
    )
    assert tokenizer.startswith("from run/step-5/huggingface: ")
    made, base = notes
    assert made == (
        "adapter_config.json is made of the tensors and lora_train_meta.json, which does not tell use_rslora and "
        "alpha_pattern: they count as off"
    )
    assert base == "not written: base_model_name_or_path in adapter_config.json: --base-model gives it"
    assert wrote.startswith(f"wrote LoRA adapter, {summary}, 1 file in out after ")
    assert {path.name for path in Path("out").iterdir()} >= {*WRITTEN, "fsdp_export.json", "tokenizer.json"}
    assert not Path("out/config.json").exists()
    assert transformers.AutoTokenizer.from_pretrained("out").eos_token == "</s>"
    assert "adapter_model.safetensors" in call("run", "--dry-run").stdout
    for option, value in (("--max-shard-size", "1GB"), ("--smoke-test", "a")):
        refusal = call("run", "--out", "out", option, value, code=2).stderr
        assert f"{option} has no effect with a LoRA adapter" in refusal


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "adapter_model.bin",
        "adapter_model.safetensors",
        "shard-00001-model-00001-of-00001.safetensors",
    ],
)
def test_files_of_other_kinds_that_hold_an_adapter_are_adapters(name, plain, tmp_path):
    tensors = on_disk(peft_model("plain"))
    record(tmp_path, peft_model("plain"))
    if name.endswith(".bin"):
        torch.save(tensors, tmp_path / name)
    elif name.startswith("shard"):
        write_shard(tmp_path / name, {key: (tensor, [0] * tensor.dim()) for key, tensor in tensors.items()})
    else:
        save_file(tensors, tmp_path / name)
    assert export_checkpoint(tmp_path / name, tmp_path / "out").files.keys() == WRITTEN
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == tensors.keys()


def test_a_config_of_the_base_model_names_it_and_its_layers(plain, tmp_path):
    base = write_hub_folder(tmp_path / "base")
    export_checkpoint(plain, tmp_path / "out", base_model=base, dtype="auto")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 12, {})
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert torch.equal(logits(load(tmp_path / "out")), logits(peft_model("plain")))


def test_an_adapter_keeps_its_dtype_unless_one_is_named(plain, tmp_path):
    base = write_hub_folder(tmp_path / "base")
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace('"float32"', '"bfloat16"'))
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        export_checkpoint(plain, tmp_path / "out", base_model=base, dtype=dtype)
        tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {expected}


def test_what_is_excluded_is_no_target(plain, tmp_path):
    export_checkpoint(plain, tmp_path / "out", exclude=["v_proj", "layers.1"])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    load(tmp_path / "out")


def test_without_lora_alpha_only_the_tensors_are_written(plain, tmp_path):
    shutil.copy(plain / "pytorch_model_fsdp.bin", tmp_path)
    report = export_checkpoint(tmp_path, tmp_path / "out", format="safetensors")
    assert report.files.keys() == {"adapter_model.safetensors"}
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == on_disk(peft_model("plain")).keys()


def test_an_adapter_and_a_model_take_each_others_place(plain, tmp_path):
    out, model = tmp_path / "out", hf_model("llama")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "base")

    def exported(source, **options):
        report = export_checkpoint(source, out, **options)
        assert {path.name for path in out.iterdir()} == {*report.files, "fsdp_export.json"}
        return report

    exported(plain)
    report = exported(tmp_path / "model.pt", base_model=tmp_path / "base")
    assert set(report.removed) == WRITTEN
    report = exported(plain)
    assert {"model.safetensors", "config.json"} <= set(report.removed)
    assert exported(plain).removed == []


def test_an_adapter_of_others_is_replaced_only_if_asked(plain, tmp_path):
    stale = {"base_model.model.old.lora_A.weight": torch.zeros(1, 1)}
    save_file(stale, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SinkError, match=r"found adapter_config\.json, adapter_model\.safetensors"):
        export_checkpoint(plain, tmp_path)
    export_checkpoint(plain, tmp_path, overwrite=True)
    assert torch.equal(logits(load(tmp_path)), logits(peft_model("plain")))


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED])
def test_what_peft_would_not_load_is_refused(
    make: Maker, error: type[ExportError], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    assert_refused(tmp_path, error, message)
