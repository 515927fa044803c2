"""Configs of live modules: the file they came from, or one that transformers 4 and 5 read alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hub_folders import CONFIG, GENERATION_CONFIG, write_hub_folder
from models import hf_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_export.config_json import edit_json
from fsdp_export.conversion.live_twin import model_class
from fsdp_export.sidecars.live_config import config_of, generate, live_edits, unwrap

LEGACY = {"rope_theta", "rope_scaling", "torch_dtype"}

needs_rope_parameters = pytest.mark.skipif(
    not hasattr(transformers.LlamaConfig(), "rope_parameters"), reason="transformers 4 has no rope_parameters"
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _llama_config(**changes: object) -> Any:
    return transformers.LlamaConfig(**{**json.loads(CONFIG), **changes})


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-tied", "llama", "gpt2"])
def test_a_generated_config_is_that_of_save_pretrained_and_the_old_spelling(kind: str, tmp_path: Path) -> None:
    model: Any = hf_model(kind)
    generated = generate(model.config, type(model).__name__, torch.float32)
    generation_config = generate(model.generation_config)
    model.save_pretrained(tmp_path)

    saved = json.loads((tmp_path / "config.json").read_text())
    config = json.loads(generated)
    assert {key: value for key, value in config.items() if key in saved} == saved
    assert config.keys() - saved.keys() <= LEGACY
    assert generated == json.dumps(json.loads(generated), indent=2, sort_keys=True) + "\n"
    assert generation_config == (tmp_path / "generation_config.json").read_text()


def test_a_generated_config_keeps_base_and_scaling_of_rope_in_both_spellings(tmp_path: Path) -> None:
    live = _llama_config()
    text = generate(live, "LlamaForCausalLM", torch.bfloat16)
    config = json.loads(text)
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == json.loads(CONFIG)["rope_scaling"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"

    (tmp_path / "config.json").write_text(text)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (
        read.to_dict()["rope_scaling" if "rope_scaling" in live.to_dict() else "rope_parameters"] == live.rope_scaling
    )


def test_a_field_that_a_class_writes_under_another_name_stands_under_its_own_too() -> None:
    """Transformers 5 writes `num_local_experts`, and transformers 4 then takes 128 for the number of experts."""
    live = transformers.Qwen3MoeConfig(num_experts=4)
    config = json.loads(generate(live, "Qwen3MoeForCausalLM", torch.float32))
    assert config["num_experts"] == 4
    assert config.keys() - json.loads(live.to_json_string()).keys() <= LEGACY | {
        "num_experts",
        "dtype",
        "architectures",
    }


def test_infinities_survive() -> None:
    live: Any = transformers.Mamba2Config(num_heads=2, head_dim=16, hidden_size=16)
    limit = json.loads(generate(live, "Mamba2Model", torch.float32))["time_step_limit"]
    assert limit[1] in (math.inf, {"__float__": "Infinity"})


@needs_rope_parameters
def test_an_old_spelling_that_its_class_would_misread_is_left_out() -> None:
    class Config(transformers.LlamaConfig):
        model_type = "picky"

        def __init__(self, **values: Any) -> None:
            if "rope_theta" in values:
                raise KeyError("rope_theta")
            super().__init__(**values)

    live = Config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, hidden_size=16, num_attention_heads=2)
    assert "rope_theta" not in json.loads(generate(live, "Picky", torch.float32))


def test_a_config_without_json_of_its_own_is_written_from_its_dict() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return {"width": 3, "dtype": torch.bfloat16}

    assert json.loads(generate(Config(), "Mine", torch.float16)) == {
        "architectures": ["Mine"],
        "dtype": "float16",
        "torch_dtype": "float16",
        "width": 3,
    }


def test_generating_leaves_the_live_config_as_it_is() -> None:
    live = _llama_config()
    before = repr(sorted(vars(live).items()))
    generate(live, "LlamaForCausalLM", torch.bfloat16)
    live_edits(live, CONFIG)
    assert repr(sorted(vars(live).items())) == before


def test_a_config_as_it_was_loaded_needs_no_edit(tmp_path: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(write_hub_folder(tmp_path / "base"))
    model.config.use_cache = False
    assert live_edits(model.config, CONFIG) == {}
    assert live_edits(model.generation_config, GENERATION_CONFIG) == {}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param({"vocab_size": 40}, {"vocab_size"}, id="resized-vocabulary"),
        pytest.param({"num_hidden_layers": 1}, {"num_hidden_layers"}, id="fewer-layers"),
        pytest.param({"rms_norm_eps": 1e-5}, set(), id="set-to-what-it-was"),
        pytest.param({"attention_bias": True}, {"attention_bias"}, id="default-that-no-file-names"),
        pytest.param({"num_labels": 3}, {"id2label", "label2id"}, id="labels"),
        pytest.param({"my_own": [1, 2]}, {"my_own"}, id="key-of-the-user"),
    ],
)
def test_what_changed_since_loading_is_edited(changes: dict[str, object], keys: set[str]) -> None:
    live = _llama_config()
    for key, value in changes.items():
        setattr(live, key, value)
    edits = live_edits(live, CONFIG)
    assert edits is not None
    assert {path[0] for path in edits} == keys
    read = transformers.LlamaConfig.from_dict(json.loads(edit_json(CONFIG, edits)))
    assert all(getattr(read, key) == value for key, value in changes.items())


@needs_rope_parameters
def test_a_changed_rope_is_edited_in_both_spellings() -> None:
    live = _llama_config()
    live.rope_parameters = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    edits = live_edits(live, CONFIG)
    assert edits == {
        ("rope_parameters",): live.rope_parameters,
        ("rope_theta",): 1e6,
        ("rope_scaling",): {"rope_type": "linear", "factor": 2.0},
    }
    read: Any = transformers.LlamaConfig.from_dict(json.loads(edit_json(CONFIG, edits)))
    assert read.rope_parameters == live.rope_parameters


def test_a_part_of_a_config_is_edited_in_its_place() -> None:
    text = json.dumps({"text_config": {"vocab_size": 32, "hidden_size": 16}, "vision_config": {"depth": 2}})
    live: Any = transformers.Qwen2VLConfig.from_dict(json.loads(text))
    live.text_config.vocab_size = 40
    assert live_edits(live, text) == {("text_config", "vocab_size"): 40}


def test_where_no_edit_helps_there_is_none() -> None:
    class Stubborn:
        width = 3

        def to_dict(self) -> dict[str, object]:
            return {"width": self.width}

        @classmethod
        def from_dict(cls, _: dict[str, object]) -> Any:
            read = cls()
            read.width = 2
            return read

    assert live_edits(Stubborn(), '{"width": 1}') is None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: model, id="bare"),
        pytest.param(lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))), id="fully-shard"),
        pytest.param(DistributedDataParallel, id="ddp"),
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compile"),
        pytest.param(lambda model: torch.compile(DistributedDataParallel(model), backend="eager"), id="compile-of-ddp"),
    ],
)
def test_wrappers_are_looked_through(wrap: Any) -> None:
    model = hf_model("qwen2")
    unwrapped = unwrap(wrap(model))
    assert unwrapped is model
    assert model_class(unwrapped) is transformers.Qwen2ForCausalLM
    assert config_of(unwrapped) is model.config


def test_a_module_of_its_own_with_one_child_is_no_wrapper() -> None:
    model: Any = nn.Module()
    model.module = hf_model("qwen2")
    model.config = None
    assert unwrap(model) is model
    assert config_of(model) is None
    assert unwrap(nn.Linear(2, 2)).in_features == 2
