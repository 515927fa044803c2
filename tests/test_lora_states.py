"""Checkpoints on disk that hold a PEFT model: merged, reduced to the adapter, or kept."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from lora_folders import assert_refused, peft_model, record
from models import shard
from peft import LoraConfig, get_peft_model
from peft_models import MODELS, draw, gpt2, llama, merged_tensors, quiet, with_lora
from rank_folders import save_as_verl
from ranks import run_ranks
from refused.peft_states import REFUSED, Maker
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from fsdp_export import export_checkpoint
from fsdp_export.cli import main
from fsdp_export.errors import ExportError, UsageError
from fsdp_export.opening import open_checkpoint

KINDS = [kind for kind in MODELS if kind != "tokens"]  # these are refused


def saved(kind, folder):
    """Save a model as trainers do, with PEFT's config beside it and the base model's below."""
    model = with_lora(kind)
    torch.save(model.state_dict(), folder / "model.pt")
    model.peft_config["default"].save_pretrained(folder)
    if hasattr(model.get_base_model(), "config"):
        model.get_base_model().config.save_pretrained(folder / "huggingface")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_merged_as_peft_merges_the_model(kind, tmp_path):
    model = saved(kind, tmp_path)
    report = export_checkpoint(tmp_path / "model.pt", tmp_path / "out", verify=True)
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), merged_tensors(model)
    if kind.startswith("gpt2"):
        expected["lm_head.weight"] = model.state_dict()["base_model.model.lm_head.weight"]
        assert kind == "gpt2" or "lm_head.weight" not in written  # it is tied still
        written.setdefault("lm_head.weight", expected["lm_head.weight"])
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        # A convolution of three dims sums in another order on another number of threads.
        assert torch.equal(tensor, expected[name]) or (
            name == "three.weight" and torch.allclose(tensor, expected[name])
        )
    assert "adapter of rank" in report.notes[0]
    assert json.loads((tmp_path / "out" / "fsdp_export.json").read_text())["lora"] == "merge"


def test_square_weights_lie_as_their_modules_have_them_whatever_peft_says_of_all(tmp_path):
    """PEFT's config has the flag of the last layer, a linear one here; attention of GPT-2 has the other kind."""
    with quiet():
        model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, lora_alpha=9, target_modules=["c_proj", "lm_head"]))
    draw(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.peft_config["default"].save_pretrained(tmp_path)
    model.get_base_model().config.save_pretrained(tmp_path / "huggingface")
    assert not json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"]
    export_checkpoint(tmp_path / "model.pt", tmp_path / "out")
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), merged_tensors(model)
    # PEFT's merge into the head goes into the embedding that is tied to it, too.
    expected["transformer.wte.weight"] = model.state_dict()["base_model.model.transformer.wte.weight"]
    assert written.keys() == expected.keys()
    assert [name for name in written if not torch.equal(written[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["plain", "embeddings", "dora", "saved", "biases", "experts"])
def test_the_adapter_of_a_state_dict_is_what_peft_saves(kind, tmp_path):
    model = saved(kind, tmp_path)
    report = export_checkpoint(tmp_path / "model.pt", tmp_path / "out", lora="adapter", verify=True)
    with quiet():
        model.save_pretrained(tmp_path / "peft")
    weights = "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "peft" / weights).read_bytes()
    assert report.files.keys() == {weights, "adapter_config.json"}
    assert json.loads((tmp_path / "out" / "fsdp_export.json").read_text())["lora"] == "adapter"


def save_with_verl(folder):
    model = shard(peft_model("plain"), "1d", dist.get_world_size())
    save_as_verl(folder, model)
    if dist.get_rank() == 0:
        record(folder, model)


def export_on_ranks(source, out):
    open_checkpoint(source, ranks=(0, 1), rank=dist.get_rank()).save(out)


def test_rank_files_of_verl_are_merged_by_one_process_and_by_two(tmp_path):
    run_ranks(save_with_verl, 2, tmp_path / "run" / "global_step_3" / "actor")
    report = export_checkpoint(tmp_path / "run", tmp_path / "one")
    run_ranks(export_on_ranks, 2, tmp_path / "run", tmp_path / "two")
    assert "lora_train_meta.json does not tell use_rslora and alpha_pattern: they count as off" in report.notes
    expected = merged_tensors(peft_model("plain"))
    for out in ("one", "two"):
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_names_can_be_kept(tmp_path):
    model = saved("saved", tmp_path)
    export_checkpoint(tmp_path / "model.pt", tmp_path / "out", lora="keep", format="safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()


def test_an_adapter_alone_is_one_by_itself_and_cannot_be_merged(tmp_path):
    model = with_lora("plain")
    with quiet():
        model.save_pretrained(tmp_path)
    source = tmp_path / "adapter_model.safetensors"
    assert "adapter_config.json" in export_checkpoint(source, tmp_path / "auto").files
    message = f"an adapter without its base model cannot be merged in {tmp_path}. Leave out --lora merge"
    with pytest.raises(UsageError, match=message):
        export_checkpoint(source, tmp_path / "merge", lora="merge")


def test_patterns_and_dtypes_are_of_the_merged_model(tmp_path):
    model = saved("plain", tmp_path)
    options = {"include": ["model.layers.0.*"], "exclude": ["mlp"], "dtype": "bfloat16"}
    export_checkpoint(tmp_path / "model.pt", tmp_path / "out", format="safetensors", **options)
    written, expected = load_file(tmp_path / "out" / "model.safetensors"), merged_tensors(model)
    assert "model.layers.0.self_attn.q_proj.weight" in written
    for name, tensor in written.items():
        assert name.startswith("model.layers.0.")
        assert torch.equal(tensor, expected[name].bfloat16())


@pytest.mark.parametrize("lora", ["merge", "adapter"])
def test_which_of_several_adapters_is_taken_is_told(lora, tmp_path):
    model = with_lora("plain")
    with quiet():
        model.add_adapter("other", model.peft_config["default"])
        model.set_adapter("other")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.peft_config["default"].save_pretrained(tmp_path)
    report = export_checkpoint(tmp_path / "model.pt", tmp_path / "out", lora=lora)
    assert "of several adapters 'default' is taken, and left out: 'other'" in report.notes


def test_a_tied_head_that_peft_adapts_with_its_embedding_is_merged(tmp_path):
    """PEFT's config lists the embedding alone, and PEFT merges both into the one weight that they share."""
    with quiet():
        config = LoraConfig(r=2, target_modules=["embed_tokens"], ensure_weight_tying=True)
        model = get_peft_model(llama(tied=True), config).eval()
    draw(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.peft_config["default"].save_pretrained(tmp_path)
    model.get_base_model().config.save_pretrained(tmp_path / "huggingface")
    export_checkpoint(tmp_path / "model.pt", tmp_path / "out")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_the_command_tells_what_it_merged(tmp_path):
    saved("plain", tmp_path)
    call = ["--out", str(tmp_path / "out"), "--lora"]
    result = CliRunner().invoke(main, [str(tmp_path / "model.pt"), *call, "merge"])
    assert result.exit_code == 0, result.output
    merge = "LoRA adapter of rank 4 on 11 modules merged into the weights, with lora_alpha 12 of "
    assert f"{merge}{tmp_path}/adapter_config.json" in result.stdout
    result = CliRunner().invoke(main, [str(tmp_path / "out" / "model.safetensors"), *call, "merge"])
    assert result.exit_code == 2
    assert "--lora has no effect with a checkpoint without LoRA. Leave one of them out." in result.stderr


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED])
def test_what_cannot_be_merged_is_refused(make: Maker, error: type[ExportError], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    assert_refused(tmp_path, error, message)
