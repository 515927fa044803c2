"""The sidecars of a live module: files that its config came from, edited where it has changed since, or made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config_json import Edits, class_edits, edit_json, vocab_edits
from ..conversion.live_twin import model_class
from ..conversion.twin import meta_twin
from ..paths import read_file
from .custom_code import code_files, code_of_class, missing_code
from .live_config import config_of, generate, live_edits, unwrap
from .origins import CONFIG, GENERATION_CONFIG, find, locate_local
from .sidecar import Origin, Sidecars, changed_keys

__all__ = ["from_model", "has_config"]


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
        _add_configs(sidecars, model, config)
    return sidecars


def _add_configs(sidecars: Sidecars, model: nn.Module, config: Any) -> None:
    unwrapped_class = model_class(model)
    folder = locate_local(getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None))
    _add(sidecars, CONFIG, config, folder, class_name=unwrapped_class.__name__, dtype=_first_dtype(model))
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and unwrapped_class.can_generate():
        _add(sidecars, GENERATION_CONFIG, generation_config, folder)
    if sidecars.config is not None:
        _add_code(sidecars, [unwrapped_class, type(config)], folder)
        _fit_vocabulary(sidecars, model)


def _add(
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
        sidecars.lacks(name, str(error))
        return
    sidecars.add({name: text.encode()}, Origin("live object", made_of="the live config"))
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
    origin = Origin.elsewhere("live object", path.parent)
    if new == old:
        sidecars.add({path.name: path}, origin)
    else:
        sidecars.add({path.name: new}, origin.but(changed_keys(edits)))
        keys = ", ".join(changed_keys(edits))
        sidecars.warnings.append(f"{path.name} differs from that of {path.parent} in {keys}")
    if path.name == CONFIG:
        sidecars.config, sidecars.config_file = json.loads(new), path


def _add_code(sidecars: Sidecars, classes: list[type], folder: Path | None) -> None:
    """Add the code that the config names, from the folder of the config, or else from the modules of the classes."""
    code = code_files(folder, sidecars.config or {}) if folder is not None else {}
    if folder is not None and code:
        sidecars.add(code, Origin.elsewhere("live object", folder))
        lacking = missing_code(sidecars.config or {}, code)
        sidecars.missing += [f"{name}: {CONFIG} names it, and {folder} lacks it" for name in lacking]
        return
    auto_map = {}
    for cls in classes:
        kind = getattr(cls, "_auto_class", None)
        if kind is None:
            continue
        found = code_of_class(cls)
        if found is None:
            sidecars.missing.append(f"the code of {cls.__name__}: no module that can be imported has it at its top")
            continue
        auto_map[kind], files = found
        sidecars.add(files, Origin.elsewhere("live object", next(iter(files.values())).parent))
    known = (sidecars.config or {}).get("auto_map")
    if auto_map and known != (wanted := {**(known if isinstance(known, dict) else {}), **auto_map}):
        sidecars.edit_config({("auto_map",): wanted})


def _fit_vocabulary(sidecars: Sidecars, model: nn.Module) -> None:
    """Let the config tell the rows of the embeddings, which training code may have resized by itself."""
    config, rows = sidecars.config or {}, _vocabulary_rows(model)
    old = _vocab_size(model)
    if old is None or set(rows.values()) <= {old}:
        return
    # Some classes have rows of their own beside those of the vocabulary, and the twin has them too.
    num_tensors = sum(1 for _ in model.parameters())
    expected = _rows_of_config(config, num_tensors)
    if not expected or expected == rows:
        return
    sizes = [new for new in set(rows.values()) if _rows_of_config(_resized(config, old, new), num_tensors) == rows]
    found = ", ".join(f"{name} of {num_rows} rows" for name, num_rows in sorted(rows.items()))
    if sizes:
        sidecars.edit_config(vocab_edits(config, old, sizes[0]))
        sidecars.warnings.append(f"vocab_size in {CONFIG} becomes {sizes[0]}, for {found}; it was {old}")
    else:
        sidecars.warnings.append(f"no vocab_size in {CONFIG} makes a model that has {found}; it is {old}")


def _rows_of_config(config: Mapping[str, Any], num_tensors: int) -> dict[str, int]:
    twin = meta_twin(config, num_tensors, warns=False)
    return _vocabulary_rows(twin) if twin is not None else {}


def _resized(config: Mapping[str, Any], old: int, new: int) -> Mapping[str, Any]:
    resized: dict[str, Any] = json.loads(edit_json(json.dumps(config), vocab_edits(config, old, new)))
    return resized


def _vocabulary_rows(model: Any) -> dict[str, int]:
    """Return the rows of the embeddings and of the head, by what they are; without those that a class does not tell."""
    rows = {}
    for name, kind in (("input_embeddings", nn.Embedding), ("output_embeddings", nn.Linear)):
        with suppress(Exception):  # a class may have none, or several
            module = getattr(model, f"get_{name}")()
            if isinstance(module, kind) and module.weight.is_floating_point():  # packed ones have other rows
                rows[name.replace("_", " ")] = int(module.weight.shape[0])
    return rows


def _vocab_size(model: Any) -> int | None:
    try:
        size = model.config.get_text_config().vocab_size
    except Exception:  # noqa: BLE001  as above
        return None
    return size if isinstance(size, int) else None


def _first_dtype(model: nn.Module) -> torch.dtype | None:
    dtypes = (parameter.dtype for parameter in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)
