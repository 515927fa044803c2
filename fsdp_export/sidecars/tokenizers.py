"""The files of a tokenizer or processor: copies where it is what it was loaded from, else as it saves itself."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config_json import REMOVED, Edits, edit_json
from .origins import TOKENIZER_CONFIG, locate_local, processor_files, tokenizer_files
from .sidecar import Origin, Sidecars

__all__ = ["TokenizerFiles", "add_tokenizer", "files_of"]

_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"

# How it was loaded and last called; transformers saves that too.
_SESSION_KEYS = {
    TOKENIZER_CONFIG: {"is_local", "local_files_only", "name_or_path", "processor_class", "trust_remote_code"},
    "tokenizer.json": {"padding", "truncation"},
}


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Attributes:
        files: By name, paths to copy and bytes to write.
        folder: The folder it was loaded from, if that still has its files.
        changed: What is not as in that folder, in words; None if nothing is.
    """

    files: dict[str, Path | bytes]
    folder: Path | None = None
    changed: str | None = None


def add_tokenizer(sidecars: Sidecars, tokenizer: object | None) -> None:
    """Add the files of a tokenizer or processor that was given, or note that none was."""
    if tokenizer is None:
        sidecars.missing.append("tokenizer: none was given")
        return
    try:
        found = files_of(tokenizer)
    except Exception as error:  # noqa: BLE001  one of any class may fail anywhere; weights are worth more
        sidecars.lacks("tokenizer", str(error))
        return
    if found.folder is not None:
        copies = {name: content for name, content in found.files.items() if isinstance(content, Path)}
        sidecars.add(copies, Origin.elsewhere("live object", found.folder))
    sidecars.add(found.files, Origin("live object", made_of="the tokenizer that was given"))
    if found.changed is not None:
        sidecars.warnings.append(f"the tokenizer is not that of {found.folder}: {found.changed}")


def files_of(tokenizer: Any) -> TokenizerFiles:
    """Return the files to save for a tokenizer or processor.

    transformers 5 saves tokenizers in a form that transformers 4 does not read. So files that it was loaded from are
    copied when nothing was changed since, which is found out by saving it, and one that is loaded afresh, to memory.
    When a few settings changed (a padding side, a chat template), only they are edited in the copies.

    Args:
        tokenizer: An object with `save_pretrained`.

    Raises:
        Exception: Whatever its `save_pretrained` raises.
    """
    saved = _saved(tokenizer)
    name = getattr(tokenizer, "name_or_path", None) or getattr(
        getattr(tokenizer, "tokenizer", None), "name_or_path", None
    )
    folder = locate_local(name)
    originals = {**tokenizer_files(folder), **processor_files(folder)} if folder is not None else {}
    if folder is None or not originals:
        return TokenizerFiles(_readable_by_4(saved))
    copies = _unless_changed(tokenizer, folder, saved, originals)
    if copies is not None:
        return copies
    is_processor = any(name.endswith("processor_config.json") for name in saved)
    beside: dict[str, Path | bytes] = {} if is_processor else {**processor_files(folder)}
    return TokenizerFiles({**beside, **_readable_by_4(saved)}, folder, "it was saved anew")


def _unless_changed(
    tokenizer: Any, folder: Path, saved: dict[str, bytes], originals: dict[str, Path]
) -> TokenizerFiles | None:
    try:
        fresh = _saved(type(tokenizer).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
    except Exception:  # noqa: BLE001  its class cannot load from there, for whatever reason: then nothing is known
        return None
    changed = {name for name in saved.keys() | fresh.keys() if _state(saved, name) != _state(fresh, name)}
    files: dict[str, Path | bytes] = {**originals}
    if not changed:
        return TokenizerFiles(files, folder)
    if TOKENIZER_CONFIG not in originals or not changed <= {TOKENIZER_CONFIG, _SPECIAL_TOKENS, _TEMPLATE}:
        return None
    edits = _setting_edits(_state(fresh, TOKENIZER_CONFIG) or {}, _state(saved, TOKENIZER_CONFIG) or {})
    if edits is None:
        return None
    words = sorted(key for (key,) in edits)
    if _SPECIAL_TOKENS in originals:
        tokens: Edits = {path: value for path, value in edits.items() if path[0].endswith("_token")}
        files[_SPECIAL_TOKENS] = _edited(originals[_SPECIAL_TOKENS], tokens)
    if _TEMPLATE in changed:
        words.append("chat template")
        files = {name: file for name, file in files.items() if name not in {_TEMPLATE, "chat_template.json"}}
        template = saved.get(_TEMPLATE)
        if template is not None:
            files[_TEMPLATE] = template
        if "chat_template" in json.loads(originals[TOKENIZER_CONFIG].read_bytes()):
            edits["chat_template",] = template.decode() if template is not None else REMOVED
    files[TOKENIZER_CONFIG] = _edited(originals[TOKENIZER_CONFIG], edits)
    return TokenizerFiles(files, folder, ", ".join(words))


def _saved(tokenizer: Any) -> dict[str, bytes]:
    """Return the files that `save_pretrained` writes, by their names relative to the folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _state(files: dict[str, bytes], name: str) -> Any:
    """Return what a saved file says of the tokenizer itself."""
    content = files.get(name)
    if content is None or name not in _SESSION_KEYS:
        return content
    return {key: value for key, value in json.loads(content).items() if key not in _SESSION_KEYS[name]}


def _setting_edits(old: dict[str, Any], new: dict[str, Any]) -> Edits | None:
    """Return the edits from one tokenizer config to another; None when more than plain settings changed."""
    edits: Edits = {
        (key,): new.get(key, REMOVED)
        for key in sorted(old.keys() | new.keys())
        if old.get(key, REMOVED) != new.get(key, REMOVED)
    }
    is_plain = all(value is REMOVED or isinstance(value, str | int | float | None) for value in edits.values())
    return edits if is_plain else None


def _edited(path: Path, edits: Edits) -> bytes:
    return edit_json(path.read_bytes().decode(), edits).encode()


def _readable_by_4(saved: dict[str, bytes]) -> dict[str, Path | bytes]:
    """Give a tokenizer saved by transformers 5 the names that transformers 4 knows too, and 5 still reads."""
    files: dict[str, Path | bytes] = {**saved}
    if TOKENIZER_CONFIG in saved:
        config = json.loads(saved[TOKENIZER_CONFIG])
        edits: Edits = {(key,): REMOVED for key in ("is_local", "local_files_only") if key in config}
        if config.get("tokenizer_class") == "TokenizersBackend":
            edits["tokenizer_class",] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            edits["extra_special_tokens",] = REMOVED
            edits["additional_special_tokens",] = config["extra_special_tokens"]
        files[TOKENIZER_CONFIG] = edit_json(saved[TOKENIZER_CONFIG].decode(), edits).encode()
    return files
