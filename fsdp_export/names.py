"""Names of tensors: wrapper segments leave them, patterns choose among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from .errors import NotFoundError, PlanError, UsageError

__all__ = ["check_unique", "matching", "select", "strip_wrappers"]

# What torch.compile, activation checkpointing and FSDP1 put into a name, wherever they wrap.
_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def strip_wrappers(name: str, ddp_modules: Sequence[str] = ()) -> str:
    """Drop the segments that wrappers put into a name.

    Args:
        name: A name as `state_dict()` gives it.
        ddp_modules: The names of DistributedDataParallel modules, `""` for the root; the segment `module` leaves a
            name only right behind one of these, since a model may own a submodule of that name.
    """
    name = _without_segments(name)
    if not ddp_modules:
        return name
    for module in sorted(map(_without_segments, ddp_modules), key=len, reverse=True):
        prefix = f"{module}." if module else ""
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    return name


def _without_segments(name: str) -> str:
    if not any(map(name.__contains__, _WRAPPER_SEGMENTS)):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)


def check_unique(names: Iterable[str]) -> None:
    """Refuse names that no checkpoint can hold.

    Raises:
        PlanError: A name stands twice, is no text, or is `__metadata__`, which a safetensors header uses for itself.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError("a name planned twice", name=name, fix="Rename one of the two modules that own it")
        if name == "__metadata__":
            raise PlanError("a reserved name", name=name, fix="Rename the tensor: a safetensors header uses this name")
        if not _is_text(name):
            fix = "Rename the tensor: its name has half of a surrogate pair"
            raise PlanError("a name that is no text", name=name, fix=fix)
        seen.add(name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def select(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Choose names by patterns; see `matching`.

    Args:
        names: All names.
        include: If any, only names that match one of these stay.
        exclude: Names that match one of these go.

    Returns:
        The chosen names in their order, and the number of names each pattern matched.

    Raises:
        UsageError: A pattern matched nothing.
        NotFoundError: No name is left.
    """
    hits = matching(names, (*include, *exclude))
    wanted = {name for pattern in include for name in hits[pattern]} if include else set(names)
    wanted -= {name for pattern in exclude for name in hits[pattern]}
    if not wanted:
        raise NotFoundError(f"no tensor is left of {len(names)}", fix="Give patterns that match some of them")
    return [name for name in names if name in wanted], {pattern: len(matched) for pattern, matched in hits.items()}


def matching(names: Sequence[str], patterns: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that each pattern matches.

    A pattern with `*`, `?` or `[` is matched against the whole name; any other one matches names that contain it as
    whole segments: `embed_tokens` matches `model.embed_tokens.weight` and not `pos_embed_tokens.weight`.

    Raises:
        UsageError: A pattern matches nothing.
    """
    hits = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
    for pattern, matched in hits.items():
        if not matched:
            raise UsageError(f"the pattern {pattern!r} matches none of {len(names)} tensors", fix=_HINT)
    return hits


_HINT = "Give whole segments of a name (embed_tokens) or a glob over all of it (*.mlp.*)"


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
