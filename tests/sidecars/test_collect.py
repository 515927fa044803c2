"""What stands beside the weights, for live modules and for checkpoints on disk, and how it is written."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import transformers
from hub_folders import CONFIG, GENERATION_CONFIG, WEIGHTS, new_tokenizer, put_into_hub_cache, write_hub_folder
from models import hf_model, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export.errors import NotFoundError, SourceError
from fsdp_export.sidecars.collect import (
    Sidecar,
    Sidecars,
    add_tokenizer,
    fit_config,
    from_folder,
    from_model,
    has_config,
    write,
)

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
CONFIGS = ("config.json", "generation_config.json")
ALL_FILES = TOKENIZER_FILES.union(CONFIGS)


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
    return write(sidecars, folder)


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


def test_custom_code_is_copied_and_not_run(base: Path) -> None:
    auto_map = '{"auto_map": {"AutoModel": "modeling_my.My", "AutoConfig": "_fsdp_init.FSDPMy"},'
    (base / "config.json").write_text(CONFIG.replace("{", auto_map, 1))
    (base / "modeling_my.py").write_text("raise SystemExit")
    model = _load(base)
    for sidecars in (from_model(model), from_folder(base)):
        assert sidecars.config is not None
        assert sidecars.config["auto_map"] == {"AutoModel": "modeling_my.My"}
        assert _texts(sidecars)["modeling_my.py"] == "raise SystemExit"


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
    assert "the code of Mine: it did not come from a folder" in sidecars.missing


def test_a_given_tokenizer_that_changed_is_told(base: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "</s>"
    sidecars = from_model(hf_model("llama"))
    add_tokenizer(sidecars, tokenizer)
    origins = {sidecar.name: sidecar.origin for sidecar in sidecars.files}
    assert origins["tokenizer.json"] == f"copied from {base}"
    assert origins["tokenizer_config.json"] == "made of the tokenizer that was given"
    assert sidecars.warnings == [f"the tokenizer is not that of {base}: pad_token"]


@pytest.mark.parametrize("depth", ["", "huggingface", "step-5/model", "a/b/c"])
def test_a_checkpoint_has_the_files_in_or_above_its_folder(depth: str, base: Path) -> None:
    folder = base / depth
    folder.mkdir(parents=True, exist_ok=True)
    sidecars = from_folder(folder)
    assert set(_texts(sidecars)) == ALL_FILES
    assert _texts(sidecars)["config.json"] == CONFIG
    assert (sidecars.missing, sidecars.warnings) == ([], [])


def test_a_huggingface_folder_beside_the_rank_files_is_seen(base: Path, tmp_path: Path) -> None:
    (tmp_path / "step/actor").mkdir(parents=True)
    base.rename(tmp_path / "step/actor/huggingface")
    assert set(_texts(from_folder(tmp_path / "step/actor"))) == ALL_FILES


@pytest.mark.parametrize(
    ("checkpoint", "configs", "tokenizer"),
    [
        ("global_step_3/actor", "global_step_3/actor/huggingface", "global_step_3/actor/huggingface"),
        ("global_step_3", "global_step_3/huggingface", "global_step_3/huggingface"),
        ("global_step_3/policy", "global_step_3/policy/huggingface", "global_step_3/policy/huggingface"),
        ("epoch_0_step_3/model", "epoch_0_step_3/model/.hf_metadata", "epoch_0_step_3/model/.hf_metadata"),
        ("epoch_0_step_3/model", "epoch_0_step_3/model/consolidated", "epoch_0_step_3/model/consolidated"),
        ("step_3/policy/weights", ".", "step_3/policy/tokenizer"),
        ("step_3/policy/weights/model", "step_3/policy/weights/model/.hf_metadata", "step_3/policy/tokenizer"),
        ("outputs/checkpoint/step-3", "outputs", "."),
        ("checkpoint-3/pytorch_model_fsdp_0", ".", "checkpoint-3"),
        ("checkpoint-3", ".", "checkpoint-3"),
    ],
    ids=["verl", "verl sft", "skyrl", "automodel", "put together", "nemo rl", "nemo rl 2", "torchtitan", "dcp", "full"],
)
def test_every_trainers_files_are_found(
    checkpoint: str, configs: str, tokenizer: str, base: Path, tmp_path: Path
) -> None:
    for name, place in [*dict.fromkeys(TOKENIZER_FILES, tokenizer).items(), *zip(CONFIGS, [configs] * 2, strict=True)]:
        (tmp_path / "run" / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(base / name, tmp_path / "run" / place)
    sidecars = from_folder(tmp_path / "run" / checkpoint)
    assert set(_texts(sidecars)) == ALL_FILES
    assert sidecars.missing == []


def test_four_folders_up_is_too_far(base: Path) -> None:
    folder = base / "a/b/c/d"
    folder.mkdir(parents=True)
    assert from_folder(folder).files == []


@pytest.mark.parametrize("has_config", [True, False], ids=["config", "no-config"])
@pytest.mark.parametrize("has_generation_config", [True, False], ids=["generation-config", "no-generation-config"])
@pytest.mark.parametrize("has_tokenizer", [True, False], ids=["tokenizer", "no-tokenizer"])
def test_what_exists_is_copied_and_what_does_not_is_listed(
    has_config: bool, has_generation_config: bool, has_tokenizer: bool, base: Path
) -> None:
    kept = {"config.json"} if has_config else set()
    kept |= {"generation_config.json"} if has_generation_config else set()
    kept |= TOKENIZER_FILES if has_tokenizer else set()
    for name in ALL_FILES - kept:
        (base / name).unlink()
    sidecars = from_folder(base)
    assert set(_texts(sidecars)) == kept
    assert [line.partition(":")[0] for line in sidecars.missing] == [
        name
        for name, is_there in (
            ("config.json", has_config),
            ("generation_config.json", has_generation_config),
            ("tokenizer", has_tokenizer),
        )
        if not is_there
    ]
    assert (sidecars.config is None) == (not has_config)


def test_the_base_model_that_was_named_counts_before_the_folders(base: Path, tmp_path: Path) -> None:
    run = write_hub_folder(tmp_path / "run")
    for name in ALL_FILES:
        (run / name).write_text('{"model_type": "another"}')
    (run / "step").mkdir()
    sidecars = from_folder(run / "step", base)
    assert {sidecar.origin for sidecar in sidecars.files} == {f"copied from {base}"}
    assert set(_texts(sidecars)) == ALL_FILES
    assert sidecars.config == json.loads(CONFIG)


def test_what_the_base_model_lacks_is_taken_from_the_folders_a_kind_at_a_time(base: Path, tmp_path: Path) -> None:
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        (base / name).unlink()
    (base / "vocab.json").write_text("{}")
    (base / "tokenizer.json").write_text("{}")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    new_tokenizer().save_pretrained(checkpoint)
    (checkpoint / "generation_config.json").write_text(GENERATION_CONFIG)
    origins = {sidecar.name: sidecar.origin for sidecar in from_folder(checkpoint, base).files}
    assert origins == {
        "config.json": f"copied from {base}",
        "generation_config.json": f"copied from {checkpoint}",
        "tokenizer.json": f"copied from {base}",
        "vocab.json": f"copied from {base}",
    }


def test_a_given_tokenizer_takes_the_place_of_one_on_disk(base: Path) -> None:
    (base / "merges.txt").write_text("")
    sidecars = from_folder(base, tokenizer=new_tokenizer())
    assert "merges.txt" not in _texts(sidecars)
    assert sidecars.missing == []


def test_a_trainers_own_config_is_passed_over(base: Path) -> None:
    folder = base / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"learning_rate": 1}')
    assert _texts(from_folder(folder))["config.json"] == CONFIG


def test_a_config_of_a_wrapped_class_is_put_right(base: Path) -> None:
    (base / "config.json").write_text(CONFIG.replace("LlamaForCausalLM", "FSDPLlamaForCausalLM"))
    assert _texts(from_folder(base))["config.json"] == CONFIG


def test_weights_and_the_rest_are_never_taken(base: Path) -> None:
    assert not set(_texts(from_folder(base))) & {*WEIGHTS, "README.md"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            b"{", "a config that cannot be read in {file}: expected a JSON object, found Expecting", id="no-json"
        ),
        pytest.param(
            b"\xff", "a config that cannot be read in {file}: expected a JSON object, found 'utf-8'", id="no-text"
        ),
        pytest.param(
            b"[]", "a config that cannot be read in {file}: expected a JSON object, found list", id="no-object"
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_named(content: bytes, message: str, base: Path) -> None:
    (base / "config.json").write_bytes(content)
    with pytest.raises(SourceError) as caught:
        from_folder(base)
    assert str(caught.value).startswith(message.format(file=base / "config.json"))


def test_a_config_that_is_a_folder_is_named(base: Path) -> None:
    (base / "config.json").unlink()
    (base / "config.json").mkdir()
    with pytest.raises(SourceError, match="found Is a directory"):
        from_folder(base)


def test_what_is_too_large_for_what_it_is_called_is_left_out(base: Path, tmp_path: Path) -> None:
    os.truncate(base / "tokenizer.json", 1 << 40)
    sidecars, out = from_folder(base), tmp_path / "out"
    out.mkdir()
    assert "tokenizer.json" not in write(sidecars, out)
    assert "tokenizer.json" in sidecars.missing
    assert "tokenizer.json was not written: too large for what it is called" in sidecars.warnings
    assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b'{"auto_map": 3}', b'{"auto_map": {"A": [[], {}, 3]}}', b"[" * 5000, b'{"a":' * 5000],
    ids=repr,
)
def test_a_tokenizer_config_of_any_content_is_copied(content: bytes, base: Path) -> None:
    (base / "tokenizer_config.json").write_bytes(content)
    (copied,) = (sidecar for sidecar in from_folder(base).files if sidecar.name == "tokenizer_config.json")
    assert copied.content == base / "tokenizer_config.json"


@pytest.mark.parametrize("code", ["-" * 100_000 + "1", "(" * 100_000, "x = " + "+".join("1" * 100_000), "\0"], ids=len)
def test_code_that_cannot_be_parsed_is_copied(code: str, base: Path) -> None:
    (base / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}')
    (base / "mine.py").write_text(code)
    assert "mine.py" in {sidecar.name for sidecar in from_folder(base).files}


def test_a_base_model_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError):
        from_folder(tmp_path, "me/nothing")
    way_out = "; give --base-model for a Hugging Face folder in place of one safetensors file"
    assert from_folder(None).missing == [
        f"config.json: not in no folder{way_out}",
        "generation_config.json: not in no folder",
        "tokenizer: none was found",
    ]
    (tmp_path / "base").mkdir()
    with pytest.raises(NotFoundError, match=r"the base model '.*/base' has no config: expected config\.json"):
        from_folder(tmp_path, tmp_path / "base")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"the base model '.*/config\.json' is a file\. Give its folder: /"):
        from_folder(tmp_path, tmp_path / "config.json")


def test_a_config_is_fitted_to_the_weights_and_to_nothing_else(base: Path) -> None:
    config = CONFIG.replace("{", '{\n  "quantization_config": {"quant_method": "fp8"},', 1)
    (base / "config.json").write_text(config.replace("false", "true"))
    sidecars = from_folder(base)
    before = _texts(sidecars)
    fitted = fit_config(sidecars, dtype=torch.bfloat16, tied=False, quantized=False)
    assert _texts(fitted) == {**before, "config.json": CONFIG.replace("float32", "bfloat16")}
    assert fitted.config == json.loads(_texts(fitted)["config.json"])
    assert len(fitted.warnings) == 2
    assert _texts(sidecars) == before
    assert sidecars.warnings == []


def test_a_config_that_is_true_already_stays_a_copy(base: Path) -> None:
    sidecars = from_folder(base)
    assert fit_config(sidecars, dtype=torch.float32) == sidecars
    assert fit_config(sidecars, dtype=None) == sidecars
    assert fit_config(Sidecars(), dtype=torch.float16, tied=False) == Sidecars()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_permissions_follow_the_umask(umask: int, base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        path.chmod(0o600)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tools.jinja").write_text("x")
    old = os.umask(umask)
    try:
        names = _write(from_folder(base), tmp_path / "out")
    finally:
        os.umask(old)
    assert "additional_chat_templates/tools.jinja" in names
    assert {stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in names} == {0o666 & ~umask}


def test_a_file_that_cannot_be_written_is_left_out_and_told(base: Path, tmp_path: Path) -> None:
    sidecars = from_folder(base)
    (base / "tokenizer.json").unlink()
    sidecars.files.append(Sidecar("config.json", "a second one", b"{}"))
    names = _write(sidecars, tmp_path / "out")
    assert set(names) == ALL_FILES - {"tokenizer.json"} == {path.name for path in (tmp_path / "out").iterdir()}
    assert sidecars.missing == ["tokenizer.json", "config.json"]
    assert sidecars.warnings == [
        "tokenizer.json was not written: No such file or directory",
        "config.json was not written: File exists",
    ]
    assert (tmp_path / "out/config.json").read_text() == CONFIG
