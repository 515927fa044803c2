"""A checkpoint against its config: what disagrees is refused or named, and nothing that loads is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_folders import write
from hub_folders import add_old_rope
from ranks import run_ranks
from refused.shapes import EMBEDDING, HEAD, REFUSED, Maker, half_resized_vocabulary, transposed_weight
from safetensors.torch import load_file

from fsdp_export import export_checkpoint
from fsdp_export.conversion.known import KnownTensors
from fsdp_export.conversion.shapes import Comparison, compare_with_config
from fsdp_export.conversion.transformers import HubForm
from fsdp_export.conversion.twin import meta_twin
from fsdp_export.errors import SourceError
from fsdp_export.opening import open_checkpoint
from fsdp_export.spec import TensorInfo

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **SMALL}
VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "mlp_ratio": 2}
# Below the size of its vocabulary, as they must be for the config of a tiny model to be valid.
IDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "pad_token_id": 0, **changes}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    ),
    "bert-masked": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**{key: value for key, value in SMALL.items() if key != "num_key_value_heads"})
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
    "qwen2-vl": lambda: transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config={**SMALL, **IDS}, vision_config=VISION)
    ),
    "llava": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config={"model_type": "llama", **SMALL},
            vision_config={
                "model_type": "clip_vision_model",
                "image_size": 8,
                "patch_size": 4,
                **{key: value for key, value in SMALL.items() if key not in {"num_key_value_heads", "vocab_size"}},
            },
        )
    ),
    "token-classifier": lambda: transformers.LlamaForTokenClassification(
        transformers.LlamaConfig(**{"num_labels": 1, **SMALL})
    ),
}


def put(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint and its config."""
    write(folder, {"model.safetensors": tensors})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def saved(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what `save_pretrained` writes: config and tensors."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def compare(tensors: Iterable[tuple[str, tuple[int, ...]]], config: dict[str, Any], **options: Any) -> Comparison:
    outputs = [TensorInfo(name, shape, options.get("dtype", torch.bfloat16)) for name, shape in tensors]
    names = [output.name for output in outputs]
    twin = meta_twin(config)
    hub = HubForm(twin) if twin is not None else None
    return compare_with_config(outputs, names, hub, config, folder=None, config_file=None)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    twin = meta_twin(config)
    assert twin is not None
    return {name: tuple(value.shape) for name, value in twin.state_dict().items()}


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[make.__name__ for make, _ in REFUSED])
def test_what_disagrees_with_its_config_is_refused(make: Maker, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    make(folder)
    with pytest.raises(SourceError) as caught:
        export_checkpoint(folder, tmp_path / "out")
    assert str(caught.value).replace(str(folder), "{folder}") == message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["modules", "hub"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_in_either_form_raises_no_objection(kind: str, form: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    config, tensors = saved(model, tmp_path / "oracle")
    tensors = tensors if form == "hub" else dict(model.state_dict())
    opened = open_checkpoint(put(tmp_path / "ckpt", config, tensors))
    assert [note for note in opened.notes if " is tied to " not in note and "of the hub's names" not in note] == []
    assert not opened.sidecars.edits


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2-vl"])
@pytest.mark.parametrize("num_rows", [40, 24], ids=["grown", "shrunk"])
def test_a_resized_vocabulary_edits_the_config(kind: str, num_rows: int, tmp_path: Path) -> None:
    model = MODELS[kind]()
    saved(model, tmp_path / "base")
    add_old_rope(tmp_path / "base" / "config.json")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    model.resize_token_embeddings(num_rows)
    _, tensors = saved(model, tmp_path / "trained")

    report = export_checkpoint(put(tmp_path / "ckpt", config, tensors), tmp_path / "out")

    resized = [name for name in tensors if name in {EMBEDDING, HEAD}]
    rows = ", ".join(sorted(resized))
    note = f"vocab_size in config.json becomes {num_rows}, the number of rows of {rows}; it was 32"
    assert report.notes[0] == note
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert loaded.get_input_embeddings().weight.shape == (num_rows, 16)
    edited = json.loads((tmp_path / "out" / "config.json").read_text())
    edited.get("text_config", edited)["vocab_size"] = 32
    if "vocab_size" in config:
        edited["vocab_size"] = config["vocab_size"]
    assert edited == config


def test_a_resized_vocabulary_of_the_size_that_is_the_default(tmp_path):
    """The config does not say the size, since it is that of the class."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 2}
    shapes = {**shapes_of(config), "transformer.wte.weight": (50260, 4)}
    del shapes[HEAD]
    comparison = compare(shapes.items(), config)
    assert comparison.edits == {("vocab_size",): 50260}
    assert comparison.error is None


def test_what_is_left_out_is_not_compared(tmp_path):
    transposed_weight(tmp_path / "ckpt")
    report = export_checkpoint(tmp_path / "ckpt", tmp_path / "out", exclude=["c_attn.weight"])
    assert report.num_tensors == 15


def test_one_file_of_safetensors_need_not_fit_a_config(tmp_path):
    transposed_weight(tmp_path / "ckpt")
    report = export_checkpoint(tmp_path / "ckpt", tmp_path / "out", format="safetensors")
    assert report.num_tensors == 16


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        pytest.param(EMBEDDING, (32, 8), torch.uint8, id="packed"),
        pytest.param(EMBEDDING, (32, 8), torch.float8_e4m3fn, id="quantized"),
        pytest.param("model.rotary_emb.inv_freq", (3,), torch.float32, id="former-buffer"),
    ],
)
def test_tensors_that_are_not_compared(name, shape, dtype):
    shapes = {**shapes_of(LLAMA), name: shape}
    comparison = compare(shapes.items(), LLAMA, dtype=dtype)
    assert (comparison.error, comparison.edits, list(comparison.notes)) == (None, {}, [])


def test_one_value_and_reordered_experts_count_as_they_are():
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(()))
            self.up = torch.nn.Parameter(torch.empty(4, 6, 8))
            self.down = torch.nn.Parameter(torch.empty(6, 8))

    known = KnownTensors(HubForm(Experts()))
    shapes = [("scale", (1,)), ("up", (4, 8, 6)), ("up", (4, 8, 7)), ("down", (8, 6))]
    expected = [known.expected_shape(TensorInfo(name, shape, torch.float32)) for name, shape in shapes]
    assert expected == [None, None, (4, 6, 8), (6, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, id="quantized"),
        pytest.param({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, id="quantized-text-part"),
        pytest.param({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, id="custom-code-of-a-known-name"),
        pytest.param({"architectures": ["MyForCausalLM"]}, id="custom-code"),
    ],
)
def test_configs_that_are_not_compared_with(changes):
    shapes = {**shapes_of(LLAMA), EMBEDDING: (3, 3), "more.weight": (1,)}
    packed = "quant" in str(changes)
    dtype = torch.float8_e4m3fn if packed else torch.bfloat16
    assert compare(shapes.items(), {**LLAMA, **changes}, dtype=dtype) == Comparison(notes=[])
    if changes.keys() == {"quantization_config"}:  # weights that are not are compared with the config all the same
        assert compare(shapes.items(), {**LLAMA, **changes}).error is not None


@pytest.mark.parametrize(
    ("lacking", "added", "expected"),
    [
        pytest.param([], [], [], id="none"),
        pytest.param([HEAD], [], [f"LlamaForCausalLM has 1 tensor that the checkpoint lacks: {HEAD}"], id="missing"),
        pytest.param(
            [HEAD],
            ["score.weight", "score.bias"],
            [
                f"LlamaForCausalLM has 1 tensor that the checkpoint lacks: {HEAD}",
                "LlamaForCausalLM does not know 2 tensors of the checkpoint: score.bias, score.weight",
                "whoever loads this gets new values for what is lacking: is the base model the one that was trained?",
            ],
            id="another-head",
        ),
        pytest.param(
            [],
            [f"base_model.{HEAD}.lora_A.weight"],
            [
                "LoRA is not merged: LlamaForCausalLM will not load these names; --lora merge merges it",
            ],
            id="adapter",
        ),
        pytest.param([], ["model.layers.1.self_attn.rotary_emb.inv_freq"], [], id="former-buffer"),
    ],
)
def test_names_that_the_class_and_the_checkpoint_do_not_share(lacking, added, expected):
    shapes = {name: shape for name, shape in shapes_of(LLAMA).items() if name not in lacking}
    comparison = compare([*shapes.items(), *((name, (1,)) for name in added)], LLAMA)
    assert (list(comparison.notes), comparison.error) == (expected, None)


def test_many_names_are_cut_short():
    names = [name for name in shapes_of(LLAMA) if ".layers.1." not in name]
    (note,) = compare([(name, shape) for name, shape in shapes_of(LLAMA).items() if name in names], LLAMA).notes
    first = ", ".join(
        f"model.layers.1.{name}.weight"
        for name in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm")
    )
    assert note == f"LlamaForCausalLM has 9 tensors that the checkpoint lacks: {first} and 4 more"


def test_missing_experts_have_the_names_of_the_checkpoints_form(tmp_path):
    config, tensors = saved(MODELS["qwen3-moe"](), tmp_path)
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items() if name != lost]
    assert compare(shapes, config).notes == [f"Qwen3MoeForCausalLM has 1 tensor that the checkpoint lacks: {lost}"]


def test_experts_of_which_some_are_there_are_not_missing(tmp_path):
    """A checkpoint that is converted has them in the hub's form, and its config may count another layer."""
    config, tensors = saved(MODELS["qwen3-moe"](), tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    down = {name for name in shapes if ".layers.1." in name and "down_proj" in name}
    (note,) = compare([(name, shape) for name, shape in shapes.items() if name not in down], config).notes
    lost = "model.layers.1.mlp.experts.down_proj"
    assert note == f"Qwen3MoeForCausalLM has 1 tensor that the checkpoint lacks: {lost}"
    (note,) = compare(shapes.items(), {**config, "num_hidden_layers": 3}).notes
    assert note.startswith("Qwen3MoeForCausalLM has 11 tensors that the checkpoint lacks: model.layers.2.input_")
    assert ".layers.0." not in note
    assert ".layers.1." not in note


def test_a_config_of_far_fewer_layers_says_which_it_does_not_know():
    shapes = shapes_of({**LLAMA, "num_hidden_layers": 8})
    (note,) = compare(shapes.items(), {**LLAMA, "num_hidden_layers": 1}).notes
    assert note.startswith("LlamaForCausalLM does not know 63 tensors of the checkpoint: model.layers.1.input_")


def test_a_misshapen_expert_of_the_hubs_form_is_refused(tmp_path):
    config, tensors = saved(MODELS["qwen3-moe"](), tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes["model.layers.1.mlp.experts.2.up_proj.weight"] = (7, 16)
    assert "expected (8, 16) as config.json has it, found (7, 16)" in str(compare(shapes.items(), config).error)


def test_names_without_that_of_the_base_model():
    shapes = {name.removeprefix("model."): shape for name, shape in shapes_of(LLAMA).items()}
    assert compare(shapes.items(), LLAMA) == Comparison(notes=[])
    shapes["norm.weight"] = (15,)
    assert "'norm.weight': expected (16,)" in str(compare(shapes.items(), LLAMA).error)


def test_names_of_another_library():
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "output.weight"]
    note = (
        f"none of the names is one of LlamaForCausalLM: found {names[1]}, {names[2]} and 1 more, expected {HEAD}, "
        f"{EMBEDDING} and 19 more; --adapter converts names, and --prefix leaves out how they begin"
    )
    assert compare([(name, (3, 3)) for name in names], LLAMA).notes == [note]


def test_names_that_the_class_declares_to_be_of_no_concern(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"^lm_head"])
    shapes = {name: shape for name, shape in shapes_of(LLAMA).items() if name != HEAD}
    comparison = compare([*shapes.items(), ("mtp.weight", (1,)), ("x.mtp.weight", (1,))], LLAMA)
    assert comparison.notes == ["LlamaForCausalLM does not know 1 tensor of the checkpoint: x.mtp.weight"]


@pytest.mark.parametrize(("kind", "parts"), [("llava", ("vision_tower.", "multi_modal_")), ("qwen2-vl", ("visual.",))])
def test_a_vision_tower_that_the_config_declares_and_training_left_out_is_listed(
    kind: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    model = MODELS[kind]()
    config, tensors = saved(model, tmp_path / "base")
    seeing = [name for name in tensors if name.startswith(parts)]
    put(tmp_path / "run", config, {name: tensor for name, tensor in tensors.items() if name not in seeing})
    notes = open_checkpoint(tmp_path / "run").notes
    lacks = f"{type(model).__name__} has {len(seeing)} tensors that the checkpoint lacks: "
    assert [note.startswith(lacks) for note in notes] == [True]


@pytest.mark.parametrize("code", [True, False], ids=["custom-code", "known-class"])
def test_what_the_base_model_has_and_no_class_misses_is_listed(code: bool, tmp_path: Path) -> None:
    """Draft heads: transformers drops them as it loads, so training loses them without a word (cases E5, E6, E8)."""
    config, tensors = saved(llama(), tmp_path / "trained")
    drafts = {"mtp.fc.weight": torch.zeros(2), "mtp.norm.weight": torch.zeros(2)}
    config = {**config, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}} if code else config
    put(tmp_path / "base", config, tensors | drafts)
    (tmp_path / "base" / "mine.py").touch()
    run = write(tmp_path / "run", {"model.safetensors": tensors})
    report = export_checkpoint(run, tmp_path / "out", base_model=tmp_path / "base")
    note = "the base model has 2 tensors that the checkpoint lacks: mtp.fc.weight, mtp.norm.weight"
    assert [line for line in report.notes if "lacks" in line] == [note]
    assert report.num_tensors == len(tensors)


def test_what_the_base_model_has_is_not_listed_where_the_checkpoint_has_it_too(tmp_path: Path) -> None:
    config, tensors = saved(llama(), tmp_path / "trained")
    put(tmp_path / "base", config, tensors | {"mtp.fc.weight": torch.zeros(2)})
    run = write(tmp_path / "run", {"model.safetensors": tensors | {"mtp.fc.weight": torch.ones(2)}})
    report = export_checkpoint(run, tmp_path / "out", base_model=tmp_path / "base")
    assert [line for line in report.notes if "lacks" in line] == []
    assert report.num_tensors == len(tensors) + 1


def test_a_tied_weight_under_its_other_name_is_not_missing():
    config = {**LLAMA, "tie_word_embeddings": True}
    shapes = {name: shape for name, shape in shapes_of(config).items() if name != EMBEDDING}
    assert compare(shapes.items(), config) == Comparison(notes=[])


def test_a_config_that_disagrees_on_one_rank_is_the_error_of_all(tmp_path):
    half_resized_vocabulary(tmp_path / "ckpt")
    other = json.loads((tmp_path / "ckpt" / "config.json").read_text()) | {"architectures": ["NobodysForCausalLM"]}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(other))

    def look() -> str:
        base = None if dist.get_rank() == 1 else tmp_path / "base"
        with pytest.raises(SourceError) as caught:
            open_checkpoint(tmp_path / "ckpt", base_model=base, ranks=(0, 1), rank=dist.get_rank())
        return str(caught.value)

    one, other_rank = run_ranks(look, 2)
    assert one == other_rank
    assert one.startswith("rank 1 (")
    assert "a vocabulary that does not fit the config" in one
