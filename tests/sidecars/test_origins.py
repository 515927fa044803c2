"""Where sidecars are looked for, and what is never taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_folders import put_into_hub_cache, write_hub_folder

from fsdp_export.errors import NotFoundError
from fsdp_export.sidecars.origins import (
    find,
    locate_base,
    locate_local,
    processor_files,
    search_folders,
    tokenizer_files,
)

COMMIT = "1234567890" * 4


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def test_search_goes_up_three_folders_and_into_those_of_trainers(tmp_path: Path) -> None:
    folder = tmp_path / "a/b/c/d"
    levels = [folder, tmp_path / "a/b/c", tmp_path / "a/b", tmp_path / "a"]
    inner = ("huggingface", ".hf_metadata", "consolidated", "tokenizer")
    assert search_folders(folder) == [place for level in levels for place in (level, *(level / name for name in inner))]


def test_tokenizer_files_are_its_own_and_never_weights(base: Path) -> None:
    for name in ("merges.txt", "vocab.json", "spiece.model", "chat_template.jinja", "tokens.txt"):
        (base / name).write_text("")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("")
    assert set(tokenizer_files(base)) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "merges.txt",
        "vocab.json",
        "spiece.model",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    }


def test_a_vocabulary_alone_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("")
    assert tokenizer_files(tmp_path) == {}
    (tmp_path / "config.json").write_text("{}")
    assert set(tokenizer_files(tmp_path)) == {"vocab.txt"}


def test_a_tokenizer_whose_config_cannot_be_read_is_found_all_the_same(base: Path) -> None:
    (base / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in tokenizer_files(base)


def test_a_processor_is_found(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert set(processor_files(tmp_path)) == {"preprocessor_config.json"}


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert find(tmp_path / "nothing", "*") == {}


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert locate_local(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", None, 3, "me/nothing", "../x/y", "not/an/id"])
def test_a_name_that_stands_for_nothing(name: object, cache: Path) -> None:
    assert locate_local(name) is None


def test_a_name_behind_a_folder_that_may_not_be_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert locate_local("/root/model") is None


def test_a_hub_id_is_its_cached_snapshot(base: Path, cache: Path) -> None:
    old = put_into_hub_cache(base, cache, "me/tiny", commit=COMMIT)
    main = put_into_hub_cache(base, cache, "me/tiny")
    assert locate_local("me/tiny") == main
    assert locate_local("me/tiny", COMMIT) == old
    assert locate_local("me/tiny", "f" * 40) is None


def test_a_base_model_is_a_folder_or_complete_in_the_cache(
    base: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    snapshot = put_into_hub_cache(base, cache, "me/tiny")
    assert locate_base(base) == (base, None)
    assert locate_base("me/tiny") == (snapshot, None)


def test_what_the_cache_lacks_is_downloaded_at_the_same_commit(
    base: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_into_hub_cache(base, cache, "me/tiny", commit=COMMIT)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer_config.json").unlink()
    (snapshot / "special_tokens_map.json").unlink()
    calls: list[dict[str, Any]] = []

    def download(model_id: str, **options: Any) -> str:
        calls.append({"model_id": model_id, **options})
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert locate_base("me/tiny") == (base, None)
    assert (calls[0]["model_id"], calls[0]["revision"]) == ("me/tiny", COMMIT)
    chosen = set(
        huggingface_hub.utils.filter_repo_objects(
            [
                "model.safetensors",
                "vocab.bin",
                "a/pytorch_model.bin",
                "config.json",
                "tokenizer.json",
                "modeling_my.py",
            ],
            allow_patterns=calls[0]["allow_patterns"],
            ignore_patterns=calls[0]["ignore_patterns"],
        )
    )
    assert chosen == {"config.json", "tokenizer.json", "modeling_my.py"}


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "unreachable"])
def test_without_the_hub_the_cache_must_do(
    offline: bool, base: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model_id: str, **options: Any) -> str:
        raise ConnectionError("no route to host.\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    reason = "HF_HUB_OFFLINE is set" if offline else "no route to host"
    with pytest.raises(NotFoundError, match=f"base model 'me/tiny' .* to be downloaded: {reason}. Give the folder"):
        locate_base("me/tiny")

    snapshot = put_into_hub_cache(base, cache, "me/tiny")
    (snapshot / "config.json").unlink()
    assert locate_base("me/tiny") == (snapshot, f"me/tiny: only what the hub cache has was used: {reason}")


@pytest.mark.parametrize(
    "names",
    [
        ("source.spm", "target.spm", "vocab.json"),
        ("vocab-src.json", "vocab-tgt.json", "merges.txt"),
        ("spiece.model", "normalizer.json"),
        ("bpe.codes", "vocab.txt"),
        ("prophetnet.tokenizer",),
        ("qwen.tiktoken", "chat_template.jinja", "chat_template.json"),
    ],
    ids=["marian", "fsmt", "whisper", "phobert", "prophetnet", "chat"],
)
def test_vocabularies_of_all_kinds_belong_to_a_tokenizer(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in (*names, "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert tokenizer_files(tmp_path).keys() == {*names, "tokenizer_config.json"}


def test_the_code_of_a_processor_belongs_to_it(tmp_path: Path) -> None:
    text = '{"auto_map": {"AutoProcessor": "processing_my.P"}}'
    (tmp_path / "processor_config.json").write_text(text)
    (tmp_path / "preprocessor_config.json").write_text('{"auto_map": {"AutoImageProcessor": "image_my.I"}}')
    (tmp_path / "video_preprocessor_config.json").write_text("no JSON")
    (tmp_path / "processing_my.py").write_text("from .helper_my import x")
    for name in ("image_my", "helper_my", "unrelated"):
        (tmp_path / f"{name}.py").touch()
    expected = {"processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}
    assert processor_files(tmp_path).keys() == expected | {"processing_my.py", "image_my.py", "helper_my.py"}
