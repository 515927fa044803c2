"""Tokenizers: copies of what they were loaded from, as long as they are that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hub_folders import TEMPLATE, new_tokenizer, write_hub_folder

from fsdp_export.sidecars.tokenizers import TokenizerFiles, files_of

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


@pytest.fixture
def tokenizer(base: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(base)


def _text(found: TokenizerFiles, name: str) -> str:
    content = found.files[name]
    return content.read_text() if isinstance(content, Path) else content.decode()


def _reload(found: TokenizerFiles, folder: Path) -> Any:
    for name in found.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(_text(found, name))
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_an_unchanged_tokenizer_is_copied(tokenizer: Any, base: Path) -> None:
    assert files_of(tokenizer) == TokenizerFiles({name: base / name for name in TOKENIZER_FILES}, base)


def test_what_is_not_of_the_tokenizer_itself_does_not_count_as_a_change(tokenizer: Any, base: Path) -> None:
    tokenizer(["a b c", "a"], truncation=True, max_length=2)
    assert files_of(tokenizer).changed is None


def test_changed_settings_are_edited_and_the_rest_is_copied(tokenizer: Any, base: Path, tmp_path: Path) -> None:
    tokenizer.pad_token = "</s>"
    tokenizer.model_max_length = 128
    found = files_of(tokenizer)
    assert found.files["tokenizer.json"] == base / "tokenizer.json"
    assert found.changed == "model_max_length, pad_token"
    assert _text(found, "tokenizer_config.json") == (base / "tokenizer_config.json").read_text().replace(
        '"model_max_length": 64', '"model_max_length": 128,\n    "pad_token": "</s>"'
    )
    assert _text(found, "special_tokens_map.json") == (base / "special_tokens_map.json").read_text().replace(
        "}", ', "pad_token": "</s>"}'
    )
    reloaded = _reload(found, tmp_path / "out")
    assert (reloaded.pad_token, reloaded.model_max_length) == ("</s>", 128)


def test_a_changed_chat_template_is_changed_wherever_it_stands(tokenizer: Any, base: Path, tmp_path: Path) -> None:
    (base / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer.chat_template = "{{ 'mine' }}"
    found = files_of(tokenizer)
    assert found.changed == "chat template"
    assert found.files.keys() == TOKENIZER_FILES | {"chat_template.jinja"}
    assert json.loads(_text(found, "tokenizer_config.json"))["chat_template"] == "{{ 'mine' }}"
    assert _reload(found, tmp_path / "out").chat_template == "{{ 'mine' }}"


def test_a_removed_chat_template_is_gone(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    found = files_of(tokenizer)
    assert _reload(found, tmp_path / "out").chat_template is None
    assert "chat_template" not in _text(found, "tokenizer_config.json")


def test_a_changed_vocabulary_is_saved_anew_beside_copies_of_the_processor(
    tokenizer: Any, base: Path, tmp_path: Path
) -> None:
    (base / "preprocessor_config.json").write_text("{}")
    tokenizer.add_tokens(["<new>"])
    found = files_of(tokenizer)
    assert found.changed == "it was saved anew"
    assert found.files["preprocessor_config.json"] == base / "preprocessor_config.json"
    assert base / "special_tokens_map.json" not in found.files.values()
    assert _reload(found, tmp_path / "out").convert_tokens_to_ids("<new>") == 8


def test_a_tokenizer_built_in_code_has_a_class_that_transformers_4_knows(tmp_path: Path) -> None:
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>", "<y>"]})
    found = files_of(tokenizer)
    config = json.loads(_text(found, "tokenizer_config.json"))
    assert (found.folder, found.changed) == (None, None)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<x>", "<y>"]
    assert not config.keys() & {"is_local", "local_files_only"}
    assert not isinstance(config.get("extra_special_tokens"), list)
    reloaded = _reload(found, tmp_path / "out")
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded.all_special_tokens == tokenizer.all_special_tokens


def test_a_tokenizer_whose_folder_is_gone_or_broken_is_saved(tokenizer: Any, base: Path) -> None:
    (base / "tokenizer.json").write_text("{")
    assert files_of(tokenizer).changed == "it was saved anew"
    base.rename(base.with_name("elsewhere"))
    assert files_of(tokenizer).folder is None


def test_code_that_the_tokenizer_names_is_copied(base: Path) -> None:
    path = base / "tokenizer_config.json"
    path.write_text(path.read_text().replace("{", '{"auto_map": {"AutoTokenizer": ["tokenization_my.T", null]},', 1))
    (base / "tokenization_my.py").write_text("raise SystemExit")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(base)
    assert files_of(tokenizer).files["tokenization_my.py"] == base / "tokenization_my.py"


def test_a_processor_is_copied_with_its_tokenizer(tokenizer: Any, base: Path) -> None:
    image_processor: Any = transformers.CLIPImageProcessor(size={"height": 8, "width": 8})
    transformers.LlavaProcessor(image_processor=image_processor, tokenizer=tokenizer, patch_size=4).save_pretrained(
        base
    )
    processor: Any = transformers.AutoProcessor.from_pretrained(base)
    found = files_of(processor)
    assert (found.folder, found.changed) == (base, None)
    assert {"processor_config.json", "tokenizer.json"} <= found.files.keys()
    assert all(isinstance(content, Path) for content in found.files.values())
