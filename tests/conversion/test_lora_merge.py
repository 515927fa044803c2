"""LoRA merged into a live model tensor by tensor, against PEFT's own merge of a copy."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from models import compiled
from peft import LoraConfig
from peft_models import ATTENTION, MODELS, draw, llama, merged, merged_tensors, quiet, with_lora
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_export import Exporter, save_checkpoint
from fsdp_export.conversion import low_rank
from fsdp_export.errors import SourceError, UsageError


def same(tensors, expected):
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_merged_equals_what_peft_merges(kind, dtype, monkeypatch):
    model = with_lora(kind, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "_apply", None)
        exporter = Exporter(model)
        tensors = dict(exporter.tensors())
    names = [output.name for output in exporter.plan.outputs]
    expected = merged_tensors(model)
    if kind.startswith("gpt2"):  # tied, so that PEFT's merge changes the head as well, or it is left out
        expected["lm_head.weight"] = before["base_model.model.lm_head.weight"]
        tensors.setdefault("lm_head.weight", expected["lm_head.weight"])
    assert names == [name for name in expected if name in names]
    assert same(tensors, expected)
    assert same(model.state_dict(), before)


def test_adapters_in_bfloat16_are_merged_within_a_rounding():
    with quiet():
        options = {"r": 4, "target_modules": [*ATTENTION, "embed_tokens"]}
        model = peft.get_peft_model(llama().bfloat16(), LoraConfig(**options), autocast_adapter_dtype=False)
    draw(model)
    tensors, expected = dict(Exporter(model).tensors()), merged_tensors(model)
    assert tensors.keys() == expected.keys()
    exact = merged(model.float()).state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
        torch.testing.assert_close(tensor.float(), exact[name], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("num_bytes", [1, 1 << 10, 1 << 13])
def test_blocks_of_rows_are_merged_as_all_of_them(num_bytes, monkeypatch):
    monkeypatch.setattr(low_rank, "_BLOCK_BYTES", num_bytes)
    for kind in ("plain", "dora", "embeddings", "tokens", "experts", "lora-bias"):
        model = with_lora(kind)
        assert same(dict(Exporter(model).tensors()), merged_tensors(model))


def test_all_active_adapters_are_merged():
    model = two_adapters()
    assert same(dict(Exporter(model).tensors()), merged(model).state_dict())
    model.set_adapter("other")
    assert same(dict(Exporter(model).tensors()), merged(model).state_dict())


def test_the_active_adapter_is_saved_as_peft_saves_it(tmp_path):
    model = two_adapters()
    message = "several active adapters: expected one, found default, other. Activate the one that is meant"
    with pytest.raises(UsageError, match=message):
        save_checkpoint(model, tmp_path / "ours")
    model.set_adapter("other")
    save_checkpoint(model, tmp_path / "ours")
    with quiet():
        model.save_pretrained(tmp_path / "peft")
    ours, theirs = (path / "adapter_model.safetensors" for path in (tmp_path / "ours", tmp_path / "peft" / "other"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["r"] == 2


def two_adapters():
    model = with_lora("plain")
    with quiet():
        model.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "gate_proj"]))
    model.base_model.set_adapter(["default", "other"])
    draw(model, 5)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_is_saved_as_peft_saves_it(kind, tmp_path):
    model = with_lora(kind)
    save_checkpoint(model, tmp_path / "ours")
    with quiet():
        model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft"))
    assert same(ours, theirs)
    assert json.loads((tmp_path / "ours" / "fsdp_export.json").read_text())["lora"] == "adapter"


def test_a_merged_checkpoint_is_that_of_the_base_model(tmp_path):
    model = with_lora("plain")
    save_checkpoint(model, tmp_path / "ours", lora="merge", max_shard_size=40_000)
    merged(model).save_pretrained(tmp_path / "theirs", max_shard_size=40_000)
    names = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors*"))
    assert len(names) > 2
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((tmp_path / "ours" / "fsdp_export.json").read_text())["lora"] == "merge"


def test_names_can_be_kept(tmp_path):
    model = with_lora("saved")
    assert dict(Exporter(model, lora="keep").tensors()).keys() == model.state_dict().keys()
    report = save_checkpoint(model, tmp_path, lora="keep")
    assert "LoRA is not merged: nothing loads these names as a model; lora='merge' merges it" in str(report)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_a_head_keeps_the_values_that_its_tied_embedding_had(options, tmp_path):
    import transformers

    with quiet():
        model = peft.get_peft_model(llama(tied=True), LoraConfig(**{"target_modules": ["q_proj"], **options})).eval()
    draw(model)
    report = save_checkpoint(model, tmp_path, lora="merge")
    assert "weights that are tied in the config differ: all are written, and the flag is off" in report.notes
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_a_tie_that_no_adapter_touches_stays(tmp_path):
    with quiet():
        model = peft.get_peft_model(llama(tied=True), LoraConfig(target_modules=["q_proj"]))
    save_checkpoint(model, tmp_path, lora="merge")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_tokens_that_a_tied_head_is_trained_with_are_those_of_the_embedding(tmp_path):
    with quiet():
        config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[0, 5, 66])
        model = peft.get_peft_model(llama(tied=True), config).eval()
        draw(model)
        model.save_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours", lora="adapter")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert same(ours, theirs)
    report = save_checkpoint(model, tmp_path / "merged", lora="merge")
    assert not any("tied" in note for note in report.notes)
    base = model.merge_and_unload()
    base.save_pretrained(tmp_path / "base")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "base"))
    assert same(ours, theirs)
    assert "lm_head.weight" not in ours
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True


def test_wrappers_leave_no_trace():
    model = with_lora("saved")
    expected = merged(model).state_dict()
    layers = model.base_model.model.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), compiled(layers[1])
    assert same(dict(Exporter(compiled(model)).tensors()), expected)


def test_adapters_without_a_peft_model_count_too(tmp_path):
    with quiet():
        model = peft.inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), llama())
    draw(model)
    assert dict(Exporter(model).tensors()).keys() == llama().state_dict().keys()
    save_checkpoint(model, tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors").keys() >= {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    }


def test_other_values_are_merged_with_other_values():
    model, ema = with_lora("plain"), with_lora("plain")
    draw(ema, 7)
    tensors = dict(Exporter(model, state_dict=ema.state_dict(), dtype="bfloat16").tensors())
    assert same(tensors, merged(ema).bfloat16().state_dict())


class Fusing:
    """Fuses two weights, after a merge into both."""

    def to_hf(self, state_dict):
        name = "model.layers.0.self_attn.{}_proj.weight"
        return {"qk": torch.cat([state_dict[name.format("q")], state_dict[name.format("k")]])}


def test_a_conversion_sees_merged_weights():
    model = with_lora("plain")
    expected = Fusing().to_hf(merged(model).state_dict())
    assert same(dict(Exporter(model, adapter=Fusing()).tensors()), expected)


@pytest.mark.parametrize("change", ["merge", "scale"])
def test_adapters_that_changed_since_the_plan_are_refused(change):
    model = with_lora("plain")
    exporter = Exporter(model)
    dict(exporter.tensors())
    if change == "merge":
        model.merge_adapter()
    else:
        model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3)
    with pytest.raises(SourceError, match="the module is not the one that was planned: its adapters changed"):
        dict(exporter.tensors())
    assert same(dict(Exporter(model).tensors()), merged(model).state_dict())


def test_a_quantized_base_is_refused_and_its_adapter_saved(tmp_path):
    model = with_lora("plain")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(SourceError) as caught:
        Exporter(model).plan  # noqa: B018  what makes it
    assert str(caught.value) == (
        "a quantized weight, into which LoRA cannot be merged, for "
        "'base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight': expected float32, bfloat16 or float16, "
        "found uint8. Take the adapter alone (--lora adapter, lora='adapter')."
    )
    assert "adapter_model.safetensors" in save_checkpoint(model, tmp_path).files


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)


Q = "'base_model.model.model.layers.0.self_attn.q_proj'"
MULTI, FOUND = "'base_model.model.attention'", "lora.layer.MultiheadAttention"
ONLY = "expected LoRA or DoRA of a linear, embedding or convolution layer, or of experts"
ALONE = "Take the adapter alone (--lora adapter, lora='adapter')."
KINDS = (
    "an adapter of a kind that is neither merged nor exported alone: 'default': expected LoRA or DoRA of PEFT, found"
)


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (llama, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), f"{KINDS} IA3. "),
        (llama, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), f"{KINDS} ADALORA. "),
        (
            llama,
            peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            f"{KINDS} PROMPT_TUNING. Keep the names that the model has (lora='keep').",
        ),
        (
            llama,
            LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
            f"an adapter that cannot be merged: 'default' for {Q}: {ONLY}, found ALoraLinearVariant. {ALONE}",
        ),
        (
            Attention,
            LoraConfig(target_modules=["attention"]),
            f"an adapter that cannot be merged: 'default' for {MULTI}: {ONLY}, found {FOUND}. {ALONE}",
        ),
    ],
    ids=["ia3", "adalora", "prompt-tuning", "alora", "multihead-attention"],
)
def test_what_cannot_be_merged_is_refused(make, config, message):
    with quiet():
        model = peft.get_peft_model(make(), config)
    with pytest.raises(UsageError) as caught:
        Exporter(model).plan  # noqa: B018  what makes it
    assert str(caught.value).startswith(message)
    assert Exporter(model, lora="keep").plan.outputs


def test_several_adapters_with_dora_are_refused():
    model = with_lora("dora")
    with quiet():
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UsageError, match="found DoRA as one of several active adapters: default, other"):
        Exporter(model).plan  # noqa: B018  what makes it


def test_what_is_no_choice_is_refused():
    with pytest.raises(UsageError) as caught:
        Exporter(with_lora("plain"), lora="fuse")
    assert str(caught.value) == "no such choice for LoRA: expected auto, merge, adapter or keep, found fuse"
