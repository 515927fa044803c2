"""A checkpoint that holds nothing but a LoRA adapter: its tensors get PEFT's names, and PEFT's config beside them."""

from __future__ import annotations

from collections.abc import Iterable

from .conversion.peft import inspect_lora, lora_names
from .errors import SourceError
from .sidecars.collect import Sidecars
from .sidecars.lora import lora_sidecars
from .sources.stored import StoredSource
from .spec import TensorInfo

__all__ = ["describe_lora", "name_as_lora"]


def name_as_lora(source: StoredSource) -> tuple[bool, list[str]]:
    """Find out whether a source is an adapter, and if it is, give its tensors PEFT's names.

    Returns:
        Whether it is one, and what was left out, a line each.

    Raises:
        UsageError: There are several adapters, and none is called default.
        SourceError: It is an adapter of another kind than LoRA.
    """
    names = lora_names([spec.name for spec in source.specs], source.folder or "")
    if names is None:
        return False, []
    num_left_out = len(source.specs) - len(names)
    source.rename(names)
    return True, [f"{num_left_out:,} tensors are not of the adapter and left out"] if num_left_out else []


def describe_lora(
    source: StoredSource, tensors: Iterable[TensorInfo], found: Sidecars, base_model: str | None
) -> tuple[Sidecars, SourceError | None]:
    """Decide on what stands beside an adapter, and say in the source's description what it is.

    Args:
        source: The adapter.
        tensors: What of it is exported.
        found: The sidecars that were found for the checkpoint.
        base_model: The base model that was named.

    Returns:
        The sidecars; or none, and why there is no config for it.

    Raises:
        SourceError: A module has half of an adapter, or matrices that do not fit each other.
    """
    adapter = inspect_lora(tensors, source.folder or "")
    source.description = f"{adapter}, {source.description}"
    try:
        return lora_sidecars(found, adapter, source.folder, base_model), None
    except SourceError as error:
        return Sidecars(), error
