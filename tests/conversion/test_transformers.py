"""Names and tensors of the hub, against `save_pretrained` of the unsharded model, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from dcp_folders import save
from exports import assert_same
from hub_models import HUB_MODELS, hub_model, logits_of, save_as_hub
from live_bytes import LiveBytes
from models import compiled
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.utils import logging

from fsdp_export import Exporter, collectives, export_checkpoint
from fsdp_export.conversion.live_twin import pretrained_twins
from fsdp_export.conversion.transformers import HubForm, convert_stored
from fsdp_export.conversion.twin import meta_twin
from fsdp_export.errors import PlanError
from fsdp_export.opening import open_checkpoint
from fsdp_export.sinks.base import MemorySink, Sink
from fsdp_export.spec import Sharding, TensorSpec

SIZES: list[Any] = ["6KB", "5GB"]
IS_4 = not hasattr(transformers, "WeightConverter")
WRAPPED = ["llama-tied", "gemma3", "mixtral", "qwen3-moe", "deepseek-v3", "qwen2-vl", "llava", "dinov2"]
WRAPPED += [] if IS_4 else ["t5"]  # whose parts share a module in transformers 4, and cannot be sharded one by one

core = pytest.mark.skipif(IS_4, reason="transformers 4 converts names of some models only")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()


def weights(folder: Path) -> dict[str, bytes]:
    """Return the weight files of a folder, and the index."""
    files = {path.name: path.read_bytes() for path in folder.glob("model*")}
    assert files
    return files


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def differing(ours: Path, theirs: Path) -> list[str]:
    mine, expected = weights(ours), weights(theirs)
    return sorted(name for name in mine.keys() | expected.keys() if mine.get(name) != expected.get(name))


def assert_loads_as(model: Any, folder: Path) -> None:
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("kind", HUB_MODELS)
def test_a_model_live_and_from_disk_is_what_save_pretrained_writes(kind, tmp_path):
    model = hub_model(kind).eval()
    exporter = Exporter(model)
    for size in SIZES:
        model.save_pretrained(tmp_path / f"theirs-{size}", max_shard_size=size)
        exporter.save(tmp_path / f"live-{size}", max_shard_size=size, fsync=False)
        assert differing(tmp_path / f"live-{size}", tmp_path / f"theirs-{size}") == []
    files = load_file(tmp_path / "theirs-5GB/model.safetensors")
    assert dict(exporter.tensors()).keys() == files.keys()
    base = tmp_path / "theirs-5GB"
    for name, source in {"dcp": save(tmp_path / "step-1", model.state_dict()), "hub": tmp_path / "theirs-6KB"}.items():
        export_checkpoint(source, tmp_path / name, base_model=base, max_shard_size="6KB", fsync=False, verify=True)
        assert differing(tmp_path / name, tmp_path / "theirs-6KB") == []
    assert_loads_as(model, tmp_path / "dcp")
    assert_loads_as(model, tmp_path / "live-5GB")


def clip() -> Any:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {"vocab_size": 33, **sizes}, {"image_size": 8, "patch_size": 4, **sizes}
    config: Any = transformers.CLIPConfig
    return transformers.CLIPModel(config(text_config=text, vision_config=vision, projection_dim=8))


@pytest.mark.parametrize("kind", ["dcp", "hub"])
def test_one_value_gets_back_the_shape_of_its_class(kind, tmp_path):
    """FSDP2 takes no 0-dim parameter, and `from_pretrained` no other one."""
    model = clip()
    model.save_pretrained(tmp_path / "theirs")
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    if kind == "hub":
        model.save_pretrained(tmp_path / "step-1")
    else:
        save(tmp_path / "step-1", model.state_dict())
    export_checkpoint(tmp_path / "step-1", tmp_path / "out", base_model=tmp_path / "theirs", fsync=False, verify=True)
    assert differing(tmp_path / "out", tmp_path / "theirs") == []
    loaded = transformers.CLIPModel.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.logit_scale, model.logit_scale[0])


def wrapped(model: Any, wrap: str) -> Any:
    """Shard a model as a whole, or every layer and every model in it too, compiled and checkpointed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrap == "all":
        for module in reversed(list(model.modules())):
            is_inner = isinstance(module, transformers.PreTrainedModel) and module is not model
            if is_inner or type(module).__name__.endswith(("Layer", "Block")):
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if wrap == "all":
        for name, module in list(model.named_modules()):
            if name.endswith(".layers.0"):
                parent = model.get_submodule(name.rpartition(".")[0])
                parent[0] = checkpoint_wrapper(compiled(module))
    return compiled(model) if wrap == "all" else model


def test_a_model_that_was_wrapped_anywhere_is_what_save_pretrained_writes(tmp_path):
    """Research 1.4: conversions are looked up by the class of a module, which `fully_shard` replaces."""
    for kind in WRAPPED:
        hub_model(kind).save_pretrained(tmp_path / kind, max_shard_size="6KB")

    def check() -> list[object]:
        wrong: list[object] = []
        for kind in WRAPPED:
            for wrap, gather_all in (("root", False), ("all", True)):
                exporter = Exporter(wrapped(hub_model(kind), wrap), bucket_bytes=700)
                exporter.save(tmp_path / "out", max_shard_size="6KB", fsync=False, gather_all=gather_all)
                wrong += [(kind, wrap, name) for name in differing(tmp_path / "out", tmp_path / kind)]
                dist.barrier()
        return wrong

    assert run_ranks(check, 2) == [[]] * 2


@core
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_experts_are_gathered_by_buckets_and_not_by_tensors(share, monkeypatch):
    """Case E1, and verl#6691: a fused tensor does not fit where a few experts do."""
    monkeypatch.setattr(collectives, "_SMALL_BYTES_ON_CPU", 2 << 10)
    monkeypatch.setattr(collectives, "_BATCH_BYTES", 2 << 10)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 64, "num_experts_per_tok": 2}
    others = {"vocab_size": 33, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4, "intermediate_size": 8}

    def check() -> tuple[int, int, int]:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **others))
        expected = {name: tensor.clone() for name, tensor in Exporter(model).tensors()}
        fused = max(parameter.nbytes for parameter in model.parameters())
        bucket_bytes = int(fused * share)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        exporter, counter, num_tensors = Exporter(model, bucket_bytes=bucket_bytes), LiveBytes(), 0
        assert len(exporter.plan.outputs) == len(expected)
        with counter:
            for name, tensor in exporter.tensors():
                assert torch.equal(tensor, expected[name])
                num_tensors += 1
                del tensor
        assert num_tensors == len(expected)
        return counter.peak, bucket_bytes, fused

    for peak, bucket_bytes, fused in run_ranks(check, 2):
        assert bucket_bytes < peak <= 3 * bucket_bytes
        assert peak < fused or share > 0.5


class ValueModel(transformers.Qwen3MoePreTrainedModel):
    """Somebody's model around one of transformers, as reward and value models are."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.AutoModel.from_config(config)
        self.v_head = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class Wrapper(nn.Module):
    """No model of transformers, but it has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model
        self.v_head = nn.Linear(16, 1)


class Hiding(Wrapper):
    """Leaves the name of what it wraps out of its state dict, as TRL's models with a value head do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        head = {f"v_head.{name}": value for name, value in self.v_head.state_dict(*args, **kwargs).items()}
        return {**self.policy.state_dict(*args, **kwargs), **head}


@core
def test_a_model_of_transformers_inside_of_a_custom_one(tmp_path):
    model = ValueModel(hub_model("qwen3-moe").config)
    model.save_pretrained(tmp_path / "theirs")
    Exporter(model).save(tmp_path / "ours", fsync=False)
    assert differing(tmp_path / "ours", tmp_path / "theirs") == []


@core
@pytest.mark.parametrize(("make", "prefix"), [(Wrapper, "policy."), (Hiding, "")])
def test_a_model_of_transformers_inside_of_a_module(make, prefix, tmp_path):
    model = hub_model("qwen3-moe")
    model.save_pretrained(tmp_path)
    inner = {prefix + name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    found = dict(Exporter(make(model)).tensors())
    head = {name: found.pop(name) for name in list(found) if name.startswith("v_head.")}
    assert sorted(head) == ["v_head.bias", "v_head.weight"]
    assert_same(dict(sorted(found.items())), dict(sorted(inner.items())))


CODE = """
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path(__file__).with_name("ran").touch()

class MineConfig(PretrainedConfig):
    model_type = "mine"
    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class MineModel(PreTrainedModel):
    config_class = MineConfig
    _tied_weights_keys = {"head.weight": "embed.weight"}
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(8, config.width)
        self.head = torch.nn.Linear(config.width, 8, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def get_output_embeddings(self):
        return self.head
"""


@core
@pytest.mark.parametrize("trust", [False, True])
def test_custom_code_runs_if_it_is_trusted_and_not_else(trust, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "modeling_mine.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}
    config = {"architectures": ["MineModel"], "model_type": "mine", "width": 4, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    weight = torch.randn(8, 4)
    source = save(tmp_path / "step-1", {"head.weight": weight, "embed.weight": weight.clone()})
    report = export_checkpoint(source, tmp_path / "out", base_model=folder, trust_remote_code=trust, fsync=False)
    names = ["embed.weight"] if trust else ["embed.weight", "head.weight"]
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == names
    told = "transformers has no class MineModel that takes this config, so names stay as they are (--trust-remote-code"
    assert any(note.startswith(told) for note in report.notes) is not trust
    assert bool(list(tmp_path.rglob("ran"))) is trust


def stored(model: Any, names: dict[str, tuple[int, ...]]) -> Any:
    sharding = Sharding.replicated((0,))
    specs = [TensorSpec(name, shape, torch.float32, sharding) for name, shape in names.items()]
    twin = meta_twin({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert twin is not None
    return convert_stored(HubForm(twin), specs, Path("ckpt"))


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@core
def test_the_hub_form_is_what_save_pretrained_writes(tmp_path):
    model = hub_model("qwen3-moe")
    model.save_pretrained(tmp_path)
    twin = meta_twin(json.loads((tmp_path / "config.json").read_text()))
    assert twin is not None
    assert HubForm(twin).shapes == shapes(load_file(tmp_path / "model.safetensors"))


@core
@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_a_prefix_that_was_taken_off_as_the_model_was_loaded_comes_back(kind, tmp_path):
    """On the hub the towers of many models are called `vision_tower.vision_model`."""
    base = tmp_path / "base"
    save_as_hub(hub_model(kind), base)
    model = type(hub_model(kind)).from_pretrained(base).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="6KB")
    assert any("vision_model" in name for name in index_of(tmp_path / "theirs"))
    Exporter(model).save(tmp_path / "live", max_shard_size="6KB", fsync=False)
    step = save(tmp_path / "step-1", model.state_dict())
    export_checkpoint(step, tmp_path / "dcp", base_model=base, max_shard_size="6KB", fsync=False)
    report = export_checkpoint(base, tmp_path / "hub", max_shard_size="6KB", fsync=False)
    assert [differing(tmp_path / name, tmp_path / "theirs") for name in ("live", "dcp", "hub")] == [[], [], []]
    assert not any("does not know" in note or "lacks" in note for note in report.notes)
    export_checkpoint(step, tmp_path / "again", base_model=tmp_path / "theirs", max_shard_size="6KB", fsync=False)
    assert differing(tmp_path / "again", tmp_path / "theirs") == []


@core
def test_names_that_are_the_hubs_already_stay_beside_others(tmp_path):
    model = hub_model("mixtral")
    model.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs/model.safetensors")
    first_of_hub = {name: tensor for name, tensor in saved.items() if ".layers.0." in name}
    rest = {name: tensor for name, tensor in model.state_dict().items() if ".layers.0." not in name}
    source = save(tmp_path / "step-1", {**rest, **first_of_hub})
    export_checkpoint(source, tmp_path / "out", base_model=tmp_path / "theirs", fsync=False)
    assert differing(tmp_path / "out", tmp_path / "theirs") == []


@core
def test_a_tensor_in_both_forms_is_refused():
    model = hub_model("mixtral")
    twice = {"model.layers.0.block_sparse_moe.gate.weight": (4, 16)}
    with pytest.raises(PlanError, match=r"two tensors that get one name for 'model.layers.0.block_sparse_moe.gate.wei"):
        stored(model, shapes(model.state_dict()) | twice)


@core
def test_a_part_of_what_is_written_as_one_is_refused_unless_it_is_left_out(tmp_path):
    model, joined = hub_model("dinov2"), "encoder.layer.1.mlp.weights_in.weight"
    model.save_pretrained(tmp_path / "theirs")
    tensors = dict(model.state_dict())
    del tensors["encoder.layer.1.mlp.up_proj.weight"]
    torch.save(tensors, tmp_path / "model.pt")
    with pytest.raises(PlanError) as caught:
        export_checkpoint(tmp_path / "model.pt", tmp_path / "out", base_model=tmp_path / "theirs")
    assert str(caught.value) == (
        f"a tensor of which a part is missing for '{joined}' in {tmp_path}: expected 2 tensors: "
        "encoder.layer.1.mlp.gate_proj.weight, encoder.layer.1.mlp.up_proj.weight, found "
        f"encoder.layer.1.mlp.gate_proj.weight. Leave what there is out with --exclude {joined}."
    )
    export_checkpoint(tmp_path / "model.pt", tmp_path / "out", base_model=tmp_path / "theirs", exclude=[joined])
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert theirs.keys() - ours.keys() == {joined}


@core
def test_what_cannot_be_turned_back_is_named():
    names = shapes(hub_model("qwen3-moe").state_dict()) | {"model.layers.1.mlp.experts.gate_up_proj": ()}
    with pytest.raises(PlanError) as caught:
        stored(hub_model("qwen3-moe"), names)
    assert str(caught.value).startswith(
        "tensors that Qwen3MoeForCausalLM cannot turn back into those of the hub in ckpt: found "
        "model.layers.*.mlp.experts.gate_up_proj: "
    )


@core
def test_a_class_that_cannot_be_turned_back_keeps_its_names(monkeypatch, caplog, tmp_path):
    def fail(*_: object) -> None:
        raise NotImplementedError("one way only")

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", fail)
    model = hub_model("qwen3-moe")
    assert list(dict(Exporter(model).tensors())) == list(model.state_dict())
    assert caplog.messages[-1] == (
        "the tensors of Qwen3MoeForCausalLM cannot be turned back into those of the hub, so they keep the names of its "
        "modules: one way only"
    )
    source = save(tmp_path / "step-1", model.state_dict())
    (tmp_path / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]})
    )
    assert open_checkpoint(source).exporter.plan.outputs[3].name in model.state_dict()


@core
def test_a_mapping_that_somebody_registered_is_followed_by_rows(monkeypatch, tmp_path):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    sources = ["experts.*.a.weight", "experts.*.b.weight"]
    operations = [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)]
    converter = WeightConverter(sources, "experts.fused", operations)
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes what is patched
    mapping = {**conversion_mapping._checkpoint_conversion_mapping_cache, "Fused": [converter]}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", mapping)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", {"Fused"})

    class Fused(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.experts = nn.ParameterDict({"fused": torch.randn(4, 6, 10)})
            self.post_init()

    model = Fused(transformers.LlamaConfig())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["experts.3.b.weight"].shape == (5, 6)
    exporter = Exporter(model)
    assert [(step.is_unitwise, step.num_units) for step in exporter.plan.steps] == [(True, 4)]
    delivered = dict(exporter.tensors())
    assert all(tensor.is_contiguous() for tensor in delivered.values())
    assert_same(dict(sorted(delivered.items())), dict(sorted(saved.items())))


def test_a_twin_has_the_classes_of_before_and_nothing_of_the_module_changes():
    def check() -> None:
        model = wrapped(hub_model("llava"), "all")
        before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
        ((path, twin),) = pretrained_twins(model)
        assert path == ""
        of_before = {name: type(module) for name, module in hub_model("llava").named_modules()}
        assert {name: type(module) for name, module in twin.named_modules()} == of_before
        assert {tensor.device.type for tensor in twin.state_dict().values()} == {"meta"}
        Exporter(model).plan  # noqa: B018
        assert before == {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}

    run_ranks(check, 1)


@pytest.mark.parametrize("trained", [False, True])
def test_a_tie_that_wrapping_broke_counts_while_the_values_are_equal(trained, tmp_path):
    """Cases D3 and D7."""
    hub_model("gemma3").save_pretrained(tmp_path / "theirs")

    def check() -> list[str]:
        model = hub_model("gemma3")
        fully_shard(model.model, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        exporter = Exporter(model)
        exporter.save(tmp_path / "out", fsync=False)
        if trained:
            with torch.no_grad():
                model.lm_head.weight.to_local().fill_(3.0 + dist.get_rank())
            return list(exporter.save(tmp_path / "out", fsync=False).notes)
        return []

    notes = run_ranks(check, 2)[0]
    saved = load_file(tmp_path / "out/model.safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ("language_model.lm_head.weight" in saved) is trained
    if not trained:
        assert differing(tmp_path / "out", tmp_path / "theirs") == []
        return
    assert saved["language_model.lm_head.weight"][:, 0].tolist() == [3.0] * 17 + [4.0] * 16
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert "weights that are tied in the config differ: all are written, and the flag is off" in notes


def test_embeddings_that_were_tied_by_hand_turn_the_flag_on(tmp_path):
    model = hub_model("llama").eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    report = Exporter(model).save(tmp_path, fsync=False)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert "embeddings are tied that are not in the config: the flag is on" in report.notes
    assert_loads_as(model, tmp_path)


class Asking(MemorySink):
    wants_aliases = True


@pytest.mark.parametrize("sink", [MemorySink(), Asking()], ids=["leaves", "wants"])
def test_a_sink_may_ask_for_tied_tensors_under_all_names(sink: Sink) -> None:
    exporter = Exporter(hub_model("gemma3"))
    exporter.send(sink)
    (alias, kept), *_ = exporter.plan.aliases
    assert (alias, kept) == ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight")
    assert isinstance(sink, MemorySink)
    assert (alias in sink.tensors) is sink.wants_aliases
    assert not sink.wants_aliases or torch.equal(sink.tensors[alias], sink.tensors[kept])
