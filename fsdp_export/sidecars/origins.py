"""Where sidecars come from: a folder, the folders above it, the local hub cache. Nothing in them is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ..config_json import parse_object
from ..errors import NotFoundError
from ..paths import is_file, is_folder, read_file
from .custom_code import code_files

__all__ = [
    "CONFIG",
    "GENERATION_CONFIG",
    "TOKENIZER_CONFIG",
    "find",
    "levels",
    "locate_base",
    "locate_local",
    "processor_files",
    "search_folders",
    "tokenizer_files",
]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# It is no sidecar: it tells the names of the base model's tensors.
_INDEX = "model.safetensors.index.json"

_TOKENIZER = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "vocab-*.json",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "tekken.json",
    *("bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json"),
    *("target_vocab.json", "word_pronunciation.json", "word_shape.json"),
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NEVER = re.compile(r".*\.(safetensors|bin|pt|pth|h5|gguf|msgpack|index\.json)")

_NUM_PARENTS = 3
# Where trainers put config and tokenizer beside the weights: verl; NeMo Automodel, twice; NeMo RL its tokenizer.
_INNER_FOLDERS = ("huggingface", ".hf_metadata", "consolidated", "tokenizer")


def levels(folder: Path) -> list[Path]:
    """Return a checkpoint's folder and those above it that may belong to its run."""
    folder = folder.resolve()
    return [folder, *folder.parents[:_NUM_PARENTS]]


def search_folders(folder: Path) -> list[Path]:
    """Return where a checkpoint's sidecars may be, nearest first: in it or above it, or in certain folders there."""
    return [place for level in levels(folder) for place in (level, *(level / name for name in _INNER_FOLDERS))]


def find(folder: Path, *patterns: str) -> dict[str, Path]:
    """Return the files of a folder that match, by their names relative to it; never weights."""
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): path for path in paths if is_file(path) and not _NEVER.fullmatch(path.name)}


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of a tokenizer by their names, with chat templates and code; empty when the folder has none.

    A vocabulary alone is taken for a tokenizer only beside a model's config.
    """
    if not find(folder, "tokenizer.json", TOKENIZER_CONFIG, CONFIG):
        return {}
    files = find(folder, *_TOKENIZER)
    return files | _code_of(folder, files, [TOKENIZER_CONFIG])


def processor_files(folder: Path) -> dict[str, Path]:
    """Return the files of an image, audio or video processor by their names, with code."""
    files = find(folder, *_PROCESSOR)
    return files | _code_of(folder, files, _PROCESSOR)


def locate_local(name: object, revision: object = None) -> Path | None:
    """Return the folder that a `name_or_path` stands for, without the network.

    Args:
        name: A local folder, or the id of a model on the hub.
        revision: The commit it was loaded at; None for the cached `main`.

    Returns:
        The folder itself or the model's snapshot in the hub cache; None when neither is there.
    """
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name)
    if is_folder(folder):
        return folder
    from huggingface_hub import try_to_load_from_cache

    for file in (CONFIG, TOKENIZER_CONFIG, "tokenizer.json"):
        try:
            found = try_to_load_from_cache(name, file, revision=str(revision) if revision else None)
        except ValueError:  # not the form of a hub id
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def locate_base(base_model: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a base model; its small files are downloaded where the hub cache lacks them.

    Args:
        base_model: A local folder, or the id of a model on the hub.

    Returns:
        The folder, and a warning when the hub was asked in vain for what the cache lacks.

    Raises:
        NotFoundError: It is no folder, and neither in the hub cache nor to be downloaded.
    """
    if is_file(Path(base_model)):
        fix = f"Give its folder: {Path(base_model).parent}"
        raise NotFoundError(f"the base model {str(base_model)!r} is a file", fix=fix)
    folder = locate_local(str(base_model))
    is_complete = folder is not None and tokenizer_files(folder) and find(folder, CONFIG)
    if folder is not None and (is_complete or is_folder(Path(base_model))):
        return folder, None
    folder, reason = _download(str(base_model), folder)
    if folder is None:
        raise NotFoundError(
            f"the base model {str(base_model)!r} is no folder, not in the hub cache and not to be downloaded: {reason}",
            fix="Give the folder of the model that was trained",
        )
    return folder, f"{base_model}: only what the hub cache has was used: {reason}" if reason else None


def _download(model_id: str, cached: Path | None) -> tuple[Path | None, str | None]:
    """Fetch a model's small files, at the cached commit if there is one; else return what there is, and why."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return cached, "HF_HUB_OFFLINE is set"
    try:
        folder = snapshot_download(
            model_id,
            revision=cached.name if cached is not None else None,
            allow_patterns=[CONFIG, GENERATION_CONFIG, _INDEX, *_TOKENIZER, *_PROCESSOR, "*.py"],
            ignore_patterns=["*.bin", "*/*.py", "*/*.model"],
        )
    except Exception as error:  # noqa: BLE001  whatever an HTTP client raises, in each version of the hub's library
        return cached, str(error).strip().partition("\n")[0].removesuffix(".")
    return Path(folder), None


def _code_of(folder: Path, files: Mapping[str, Path], names: Iterable[str]) -> dict[str, Path]:
    """Return the code that some of these files name; one of them that cannot be read is copied all the same."""
    code: dict[str, Path] = {}
    for name in names:
        with suppress(KeyError, OSError, ValueError):
            code |= code_files(folder, parse_object(read_file(files[name])))
    return code
