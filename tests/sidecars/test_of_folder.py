"""What stands beside the weights of a checkpoint on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from hub_folders import (
    ALL_FILES,
    CONFIG,
    CONFIGS,
    GENERATION_CONFIG,
    QUANTIZATION,
    TOKENIZER_FILES,
    WEIGHTS,
    new_tokenizer,
    write_hub_folder,
)

from fsdp_export.errors import NotFoundError, SourceError
from fsdp_export.sidecars.of_folder import from_folder
from fsdp_export.sidecars.of_model import from_model
from fsdp_export.sidecars.sidecar import Sidecars


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


def _load(base: Path | str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def _texts(sidecars: Sidecars) -> dict[str, str]:
    return {sidecar.name: sidecar.text() for sidecar in sidecars.files}


def test_custom_code_is_copied_and_not_run(base: Path) -> None:
    auto_map = '{"auto_map": {"AutoModel": "modeling_my.My", "AutoConfig": "_fsdp_init.FSDPMy"},'
    (base / "config.json").write_text(CONFIG.replace("{", auto_map, 1))
    (base / "modeling_my.py").write_text("raise SystemExit")
    model = _load(base)
    for sidecars in (from_model(model), from_folder(base)):
        assert sidecars.config is not None
        assert sidecars.config["auto_map"] == {"AutoModel": "modeling_my.My"}
        assert _texts(sidecars)["modeling_my.py"] == "raise SystemExit"


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
    assert {str(sidecar.origin) for sidecar in sidecars.files} == {f"copied from {base}"}
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
    origins = {sidecar.name: str(sidecar.origin) for sidecar in from_folder(checkpoint, base).files}
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
    assert not set(_texts(from_folder(base))) & {*WEIGHTS, *QUANTIZATION, "README.md"}


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


def test_code_that_the_config_names_and_that_is_not_there_is_missing(base: Path) -> None:
    auto_map = '{"auto_map": {"AutoConfig": "configuration_my.C", "AutoModel": "modeling_my.M"},'
    (base / "config.json").write_text(CONFIG.replace("{", auto_map, 1))
    (base / "modeling_my.py").touch()
    sidecars = from_folder(base)
    assert "modeling_my.py" in _texts(sidecars)
    assert sidecars.missing == [f"configuration_my.py: config.json names it, and {base} lacks it"]


def test_the_place_of_every_kind_is_told_as_seen_from_the_checkpoint(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/step-3/actor"
    (folder / "huggingface").mkdir(parents=True)
    (base / "config.json").rename(folder / "huggingface/config.json")
    (base / "generation_config.json").rename(folder / "generation_config.json")
    for name in TOKENIZER_FILES:
        (base / name).rename(tmp_path / "run" / name)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        found = {sidecar.name: sidecar.origin.as_json() for sidecar in from_folder(path).files}
        assert found.pop("config.json") == {"from": "source", "at": "huggingface"}
        assert found.pop("generation_config.json") == {"from": "source"}
        assert found == {name: {"from": "parent", "at": "../.."} for name in TOKENIZER_FILES}
