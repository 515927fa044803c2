"""Everything of a Hugging Face folder that is not weights: decided first, written by one process.

Files that exist where the model came from are copied byte for byte; in a config only the keys that must change are
edited, because transformers 5 re-saves configs in a form that transformers 4 reads wrongly and without an error.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import NotFoundError, SourceError
from ..paths import read_file
from .config_json import REMOVED, Edits, class_edits, dtype_edits, edit_json, parse_object, tie_edits, untie_edits
from .live_config import config_of, generate, live_edits, model_class, unwrap
from .origins import (
    CONFIG,
    GENERATION_CONFIG,
    code_files,
    find,
    locate_base,
    locate_local,
    processor_files,
    search_folders,
    tokenizer_files,
)
from .tokenizers import files_of

__all__ = [
    "Sidecar",
    "Sidecars",
    "add_tokenizer",
    "fit_config",
    "from_folder",
    "from_model",
    "has_config",
    "read_config",
    "write",
]

_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Sidecar:
    """One file beside the weights.

    Attributes:
        name: Its name in the folder, with `/` between parts.
        origin: Where it comes from, in words.
        content: Its bytes, or the file to copy them from.
    """

    name: str
    origin: str
    content: bytes | Path

    def text(self) -> str:
        """Return the content of a text file."""
        return (read_file(self.content) if isinstance(self.content, Path) else self.content).decode()


@dataclass
class Sidecars:
    """What will be written beside the weights.

    Attributes:
        files: The files.
        missing: What was looked for and is not there, in words.
        warnings: What a user should know, in sentences without a full stop.
        config: The parsed `config.json` as it will be written; None without one.
        config_file: The file that it was read from, if it was.
        edits: What of the config the weights' shapes change; see `fit_config`.
    """

    files: list[Sidecar] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_file: Path | None = None
    edits: Edits = field(default_factory=dict)

    def add(self, files: Mapping[str, bytes | Path], origin: str) -> None:
        """Add files, except those whose names are taken."""
        taken = {sidecar.name for sidecar in self.files}
        self.files += [Sidecar(name, origin, content) for name, content in files.items() if name not in taken]


def has_config(model: nn.Module) -> bool:
    """Tell whether a module, wrapped or not, has a config of which a `config.json` can be made."""
    return config_of(unwrap(model)) is not None


def from_model(model: nn.Module) -> Sidecars:
    """Decide on the sidecars of a live module. Neither it nor its config is changed, and the network is not used.

    Args:
        model: The module; wrappers (DDP, torch.compile, FSDP2) are looked through.

    Returns:
        The sidecars. What cannot be made, for whatever reason, is missing and warned about: weights are worth more.
    """
    model = unwrap(model)
    sidecars = Sidecars()
    config = config_of(model)
    if config is None:
        sidecars.missing.append(f"{CONFIG}: the module has no config")
    else:
        _add_live_configs(sidecars, model, config)
    return sidecars


def add_tokenizer(sidecars: Sidecars, tokenizer: object | None) -> None:
    """Add the files of a tokenizer or processor that was given, or note that none was."""
    if tokenizer is None:
        sidecars.missing.append("tokenizer: none was given")
        return
    try:
        found = files_of(tokenizer)
    except Exception as error:  # noqa: BLE001  as for configs
        _lacks(sidecars, "tokenizer", str(error))
        return
    copies = {name: content for name, content in found.files.items() if isinstance(content, Path)}
    sidecars.add(copies, f"copied from {found.folder}")
    sidecars.add(found.files, "made of the tokenizer that was given")
    if found.changed is not None:
        sidecars.warnings.append(f"the tokenizer is not that of {found.folder}: {found.changed}")


def from_folder(
    folder: Path | None, base_model: str | Path | None = None, *, tokenizer: object | None = None
) -> Sidecars:
    """Decide on the sidecars of a checkpoint on disk.

    Each kind (config, generation config, tokenizer, processor) is taken whole from the first place that has it: the
    base model, since it was named; the folder; a folder above it, or one of the folders in these in which trainers
    keep such files.

    Args:
        folder: The checkpoint.
        base_model: The folder or hub id of the model that was trained. Asked of the hub only if the cache lacks it.
        tokenizer: A tokenizer or processor to save instead of the one found.

    Raises:
        SourceError: A config is not readable, or not JSON.
        NotFoundError: There is no such base model.
    """
    sidecars = Sidecars()
    places = search_folders(folder) if folder is not None else []
    if base_model is not None:
        base, warning = locate_base(base_model)
        places.insert(0, base)
        sidecars.warnings += [warning] if warning else []
    searched = " or ".join(filter(None, [str(folder or ""), str(base_model or "")])) or "no folder"
    _add_found_config(sidecars, places)
    if sidecars.config is None and base_model is not None:
        fix = "Give the folder or hub id of the model that was trained, or leave it out to write one safetensors file"
        raise NotFoundError(f"the base model {os.fspath(base_model)!r} has no config", expected=CONFIG, fix=fix)
    if sidecars.config is None:
        way_out = "; give --base-model for a Hugging Face folder in place of one safetensors file"
        sidecars.missing.append(f"{CONFIG}: not in {searched}{way_out}")
    if not _add_first(sidecars, places, lambda place: find(place, GENERATION_CONFIG)):
        sidecars.missing.append(f"{GENERATION_CONFIG}: not in {searched}")
    if tokenizer is not None:
        add_tokenizer(sidecars, tokenizer)
    elif not _add_first(sidecars, places, tokenizer_files):
        sidecars.missing.append("tokenizer: none was found")
    _add_first(sidecars, places, processor_files)
    return sidecars


def fit_config(
    sidecars: Sidecars, *, dtype: torch.dtype | None, tied: bool | None = None, quantized: bool | None = None
) -> Sidecars:
    """Return the sidecars with a config that is true to the weights; only what is not is edited.

    Args:
        sidecars: What was decided; left as it is.
        dtype: The dtype of the first floating tensor in the files; None when there is none.
        tied: False where weights that the config declares tied are written one by one, since their values differ; True
            where embeddings that it declares not to be are one parameter, which is written once.
        quantized: Whether tensors are packed as `quantization_config` says; False drops it, None leaves it.
    """
    files, warnings = list(sidecars.files), list(sidecars.warnings)
    config = sidecars.config
    if config is not None:
        edits = dict(sidecars.edits)
        if dtype is not None:
            edits.update(dtype_edits(config, dtype))
        if tied:
            edits.update(tie_edits(config))
            warnings.append("embeddings are tied that are not in the config: the flag is on")
        if tied is False:
            edits.update(untie_edits(config))
            warnings.append("weights that are tied in the config differ: all are written, and the flag is off")
        if quantized is False and "quantization_config" in config:
            edits["quantization_config",] = REMOVED
            warnings.append("quantization_config was dropped: the weights are not quantized")
        position = next(index for index, sidecar in enumerate(files) if sidecar.name == CONFIG)
        old = files[position]
        if edits:
            text = edit_json(old.text(), edits)
            files[position] = Sidecar(CONFIG, f"{old.origin}, fitted to the weights: {_keys(edits)}", text.encode())
            config = json.loads(text)
    return replace(sidecars, files=files, missing=list(sidecars.missing), warnings=warnings, config=config)


def write(sidecars: Sidecars, folder: Path, *, fsync: bool = True) -> list[str]:
    """Write the files. One process calls this, for a folder in which none of them exists.

    What cannot be written is left out, warned about and added to `missing`. Permissions follow the umask.

    Args:
        sidecars: What was decided.
        folder: An existing folder.
        fsync: Whether to return only when the disk has the bytes.

    Returns:
        The names that were written.
    """
    written = []
    for sidecar in sidecars.files:
        try:
            _write_file(sidecar, folder / sidecar.name, fsync=fsync)
        except OSError as error:
            _lacks(sidecars, sidecar.name, error.strerror or str(error))
        else:
            written.append(sidecar.name)
    return written


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file.

    Raises:
        SourceError: It is not readable, or no JSON object.
    """
    try:
        return parse_object(read_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError("a config that cannot be read", file=path, expected="a JSON object", found=reason) from error


def _add_live_configs(sidecars: Sidecars, model: nn.Module, config: Any) -> None:
    unwrapped_class = model_class(model)
    folder = locate_local(getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None))
    _add_live(sidecars, CONFIG, config, folder, class_name=unwrapped_class.__name__, dtype=_first_dtype(model))
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and unwrapped_class.can_generate():
        _add_live(sidecars, GENERATION_CONFIG, generation_config, folder)
    code = code_files(folder, sidecars.config) if folder is not None and sidecars.config is not None else {}
    sidecars.add(code, f"copied from {folder}")
    if getattr(unwrapped_class, "_auto_class", None) is not None and not code:
        sidecars.missing.append(f"the code of {unwrapped_class.__name__}: it did not come from a folder")


def _add_live(
    sidecars: Sidecars,
    name: str,
    live: Any,
    folder: Path | None,
    *,
    class_name: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Add a config: the file it was loaded from, edited where it has changed since, else one made of it."""
    path = find(folder, name).get(name) if folder is not None else None
    if path is not None:
        edits = _edits_of_origin(live, path, class_name)
        if edits is not None:
            _add_edited(sidecars, path, edits)
            return
        sidecars.warnings.append(f"{name} was made anew: no edit makes {path} say what the live config says")
    try:
        text = generate(live, class_name, dtype)
    except Exception as error:  # noqa: BLE001  a config of any class may fail anywhere; weights are worth more
        _lacks(sidecars, name, str(error))
        return
    sidecars.add({name: text.encode()}, "made of the live config")
    if name == CONFIG:
        sidecars.config = json.loads(text)


def _edits_of_origin(live: Any, path: Path, class_name: str | None) -> Edits | None:
    try:
        text = path.read_bytes().decode()
        edits = live_edits(live, text)
        return edits if edits is None or class_name is None else {**edits, **class_edits(json.loads(text), class_name)}
    except Exception:  # noqa: BLE001  the file may be anything by now, and its class is not ours
        return None


def _add_edited(sidecars: Sidecars, path: Path, edits: Edits) -> None:
    old = read_file(path)
    new = edit_json(old.decode(), edits).encode()
    if new == old:
        sidecars.add({path.name: path}, f"copied from {path.parent}")
    else:
        sidecars.add({path.name: new}, f"copied from {path.parent}, changed: {_keys(edits)}")
        sidecars.warnings.append(f"{path.name} differs from that of {path.parent} in {_keys(edits)}")
    if path.name == CONFIG:
        sidecars.config, sidecars.config_file = json.loads(new), path


def _add_found_config(sidecars: Sidecars, places: Sequence[Path]) -> None:
    """Add the nearest file that is a model's config; a trainer's own file of that name has no model type."""
    for place in places:
        config = read_config(place / CONFIG) if os.path.lexists(place / CONFIG) else {}
        if {"model_type", "architectures"} & config.keys():
            _add_edited(sidecars, place / CONFIG, class_edits(config, None))
            sidecars.add(code_files(place, config), f"copied from {place}")
            return


def _add_first(sidecars: Sidecars, places: Sequence[Path], find_files: Callable[[Path], dict[str, Path]]) -> bool:
    """Add the files of one kind from the nearest place that has any, none from another; return whether there is one."""
    for place in places:
        if files := find_files(place):
            sidecars.add(files, f"copied from {place}")
            return True
    return False


def _first_dtype(model: nn.Module) -> torch.dtype | None:
    dtypes = (parameter.dtype for parameter in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _keys(edits: Edits) -> str:
    return ", ".join(sorted(".".join(path) for path in edits))


def _lacks(sidecars: Sidecars, name: str, reason: str) -> None:
    sidecars.missing.append(name)
    sidecars.warnings.append(f"{name} was not written: {reason}")


def _write_file(sidecar: Sidecar, path: Path, *, fsync: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    file = path.open("xb")
    try:
        with file:
            if isinstance(sidecar.content, Path):
                with sidecar.content.open("rb") as source:
                    _check_size(source.fileno())
                    shutil.copyfileobj(source, file)
            else:
                file.write(sidecar.content)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _check_size(descriptor: int) -> None:
    if os.fstat(descriptor).st_size > _MAX_BYTES:
        raise OSError(errno.EFBIG, "too large for what it is called")
