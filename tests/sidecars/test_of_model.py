"""What stands beside the weights of a live module."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import transformers
from hub_folders import ALL_FILES, CONFIG, GENERATION_CONFIG, put_into_hub_cache, write_hub_folder
from models import hf_model, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import save_checkpoint
from fsdp_export.sidecars.of_model import from_model, has_config
from fsdp_export.sidecars.sidecar import Sidecars
from fsdp_export.sidecars.tokenizers import add_tokenizer
from fsdp_export.sidecars.writing import write


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _load(base: Path | str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def _texts(sidecars: Sidecars) -> dict[str, str]:
    return {sidecar.name: sidecar.text() for sidecar in sidecars.files}


def _write(sidecars: Sidecars, folder: Path) -> list[str]:
    folder.mkdir()
    return list(write(sidecars, folder))


def test_a_model_as_it_was_loaded_has_the_files_it_was_loaded_from(base: Path, tmp_path: Path) -> None:
    sidecars = from_model(_load(base))
    add_tokenizer(sidecars, transformers.AutoTokenizer.from_pretrained(base))
    out = tmp_path / "out"
    assert set(_write(sidecars, out)) == {path.name for path in out.iterdir()} == ALL_FILES
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in ALL_FILES)
    assert (sidecars.missing, sidecars.warnings) == ([], [])
    assert sidecars.config == json.loads(CONFIG)


def test_files_of_the_hub_cache_are_copied_as_regular_files(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    put_into_hub_cache(base, tmp_path / "cache", "me/tiny")
    model = _load(base)
    model.config._name_or_path = "me/tiny"
    _write(from_model(model), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert not path.is_symlink()
        assert path.read_bytes() == (base / path.name).read_bytes()


def test_what_changed_since_loading_is_edited_and_told(base: Path) -> None:
    model = _load(base)
    model.resize_token_embeddings(40, mean_resizing=False)
    model.generation_config.temperature = 0.5
    sidecars = from_model(model)
    assert _texts(sidecars) == {
        "config.json": CONFIG.replace('"vocab_size": 32', '"vocab_size": 40'),
        "generation_config.json": GENERATION_CONFIG.replace("0.6", "0.5"),
    }
    assert sidecars.warnings == [
        f"config.json differs from that of {base} in vocab_size",
        f"generation_config.json differs from that of {base} in temperature",
    ]
    assert sidecars.missing == []


def test_another_class_than_that_of_the_file_is_named(base: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    sidecars = from_model(model)
    assert _texts(sidecars) == {"config.json": CONFIG.replace("LlamaForCausalLM", "LlamaForSequenceClassification")}


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_module_built_in_code_has_the_config_of_a_whole_one(tmp_path: Path) -> None:
    model = hf_model("qwen2-tied")
    whole = _texts(from_model(model))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    before = repr(sorted(vars(model.config).items()))
    assert _texts(from_model(model)) == whole
    assert repr(sorted(vars(model.config).items())) == before
    assert json.loads(whole["config.json"])["architectures"] == ["Qwen2ForCausalLM"]
    assert whole.keys() == {"config.json", "generation_config.json"}


def test_a_module_that_cannot_generate_has_no_generation_config() -> None:
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    model: Any = transformers.BertModel(config)
    model.generation_config = transformers.GenerationConfig()
    assert _texts(from_model(model)).keys() == {"config.json"}


def test_a_module_without_config_has_nothing() -> None:
    model = tiny()
    sidecars = from_model(model)
    assert (sidecars.files, sidecars.config) == ([], None)
    assert sidecars.missing == ["config.json: the module has no config"]
    add_tokenizer(sidecars, None)
    assert sidecars.missing[1:] == ["tokenizer: none was given"]
    assert not has_config(model)
    assert has_config(hf_model("llama"))


@pytest.mark.parametrize("spoil", ["{", '{"model_type": 3}', "[]"], ids=["no-json", "another-config", "no-object"])
def test_an_origin_that_is_no_longer_its_own_is_not_used(spoil: str, base: Path) -> None:
    model = _load(base)
    (base / "config.json").write_text(spoil)
    sidecars = from_model(model)
    assert sidecars.config is not None
    assert sidecars.config["rope_theta"] == 500000.0


def test_what_cannot_be_made_does_not_cost_the_rest(base: Path) -> None:
    class Broken:
        def to_dict(self) -> None:
            raise ValueError("a config that fails")

        def save_pretrained(self, folder: str) -> None:
            raise ValueError("a tokenizer that fails")

    model: Any = nn.Linear(2, 2)
    model.config = Broken()
    sidecars = from_model(model)
    add_tokenizer(sidecars, Broken())
    assert sidecars == Sidecars(
        [],
        ["config.json", "tokenizer"],
        ["config.json was not written: a config that fails", "tokenizer was not written: a tokenizer that fails"],
    )


@pytest.mark.usefixtures("one_rank")
def test_custom_code_without_a_folder_is_missing() -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    Mine.register_for_auto_class("AutoModelForCausalLM")
    model = Mine(transformers.LlamaConfig.from_dict(json.loads(CONFIG)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    sidecars = from_model(model)
    assert sidecars.config is not None
    assert sidecars.config["architectures"] == ["Mine"]
    assert "auto_map" not in sidecars.config
    assert "the code of Mine: no module that can be imported has it at its top" in sidecars.missing


def test_a_given_tokenizer_that_changed_is_told(base: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "</s>"
    sidecars = from_model(hf_model("llama"))
    add_tokenizer(sidecars, tokenizer)
    origins = {sidecar.name: str(sidecar.origin) for sidecar in sidecars.files}
    assert origins["tokenizer.json"] == f"copied from {base}"
    assert origins["tokenizer_config.json"] == "made of the tokenizer that was given"
    assert sidecars.warnings == [f"the tokenizer is not that of {base}: pad_token"]


CODE = {
    "configuration_mine": """
from transformers import LlamaConfig


class MineConfig(LlamaConfig):
    model_type = "mine-of-a-test"


MineConfig.register_for_auto_class()
""",
    "modeling_mine": """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig
from .helper_mine import NAME


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    name = NAME


MineForCausalLM.register_for_auto_class("AutoModelForCausalLM")
""",
    "helper_mine": "NAME = 'mine'",
}


def test_code_of_live_classes_is_copied_so_that_the_folder_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was made from its own classes and loaded from nowhere."""
    package = tmp_path / "package_of_mine"
    package.mkdir()
    for name, text in CODE.items():
        (package / f"{name}.py").write_text(text)
    (package / "unrelated.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("package_of_mine.modeling_mine")
    model = module.MineForCausalLM(module.MineConfig.from_dict(json.loads(CONFIG)))
    save_checkpoint(model, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.py")} == {f"{name}.py" for name in CODE}
    assert all((tmp_path / "out" / f"{name}.py").read_text() == text for name, text in CODE.items())
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Other tests may have left a package of that name.
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    auto: Any = transformers.AutoModelForCausalLM
    loaded, info = auto.from_pretrained(tmp_path / "out", trust_remote_code=True, output_loading_info=True)
    assert type(loaded).__module__.startswith("transformers_modules.")
    assert loaded.name == "mine"
    assert not any(info.values())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_embeddings_that_training_code_resized_by_itself_edit_the_config(base: Path) -> None:
    model = _load(base)
    model.set_input_embeddings(nn.Embedding(40, 16))
    model.set_output_embeddings(nn.Linear(16, 40, bias=False))
    sidecars = from_model(model)
    assert _texts(sidecars)["config.json"] == CONFIG.replace('"vocab_size": 32', '"vocab_size": 40')
    found = "input embeddings of 40 rows, output embeddings of 40 rows"
    assert sidecars.warnings == [f"vocab_size in config.json becomes 40, for {found}; it was 32"]
    assert model.config.vocab_size == 32


def test_embeddings_that_no_vocabulary_explains_are_told(base: Path) -> None:
    model = _load(base)
    model.set_input_embeddings(nn.Embedding(40, 16))
    sidecars = from_model(model)
    assert _texts(sidecars)["config.json"] == CONFIG
    found = "input embeddings of 40 rows, output embeddings of 32 rows"
    assert sidecars.warnings == [f"no vocab_size in config.json makes a model that has {found}; it is 32"]


def test_rows_that_a_class_adds_to_its_vocabulary_are_its_own() -> None:
    """Moshi has one embedding more than words."""
    config = transformers.MoshiConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8
    )
    model: Any = transformers.MoshiForCausalLM(config)
    assert model.get_input_embeddings().weight.shape[0] == 33
    sidecars = from_model(model)
    assert sidecars.config is not None
    assert sidecars.config["vocab_size"] == 32
    assert not any("vocab_size" in warning for warning in sidecars.warnings)
