"""A file of `torch.save` that holds a state dict, alone or among other things, and where in it every tensor lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

from ..errors import SourceError
from ..spec import Box
from .archive import DataFiles, Place
from .dtensor_pickle import STATE_NAMES, DTensor
from .stored import Located, StoredTensor
from .tensor_pickle import TensorView, find_storage
from .torch_archive import Archive, StoredView, locate_view
from .unpickle import unpickle

__all__ = ["StateFile", "locator"]

_MAX_DEPTH = 8
_MAX_KEY_LENGTH = 10_000
_MAX_LOCATED = 16_384
_Entry = tuple[tuple[str, ...], object]


class StateFile:
    """The tensors in a file, under the keys that lead to them, joined by dots.

    Args:
        files: The folder's data files.
        name: The file, relative to the folder.

    Attributes:
        file: The file.
        paths: For every tensor the keys that lead to it, in the order of the file.
        others: Entries that are no tensors.

    Raises:
        SourceError: The file cannot be read, is no archive of `torch.save`, or holds no dict.
        UnsafeInputError: Its pickle names what no state dict needs.
    """

    def __init__(self, files: DataFiles, name: str) -> None:
        self.file: Path = files.folder / name
        self._archive = Archive(files, Place(name, 0, files.size(name)))
        data = self._archive.pickle()
        content = unpickle(data, STATE_NAMES, file=self.file, persistent=find_storage)
        if not isinstance(content, dict):
            found = "a tensor" if isinstance(content, (TensorView, DTensor)) else f"a {type(content).__name__}"
            fix = "Save the module's state_dict()"
            raise SourceError("no state dict", file=self.file, expected="a dict", found=found, fix=fix)
        self.paths: dict[str, tuple[str, ...]] = {}
        self.others: list[str] = []
        self._tensors: dict[str, TensorView | DTensor] = {}
        for path, value in self._walk(content, len(data)):
            self._add(path, value)

    def tensor(self, key: str) -> TensorView | DTensor:
        """Return a tensor as the file describes it."""
        return self._tensors[key]

    def stored(self, view: TensorView, key: str) -> StoredView:
        """Return where the elements of a tensor, or of a DTensor's local tensor, are.

        Raises:
            SourceError: They are not all there, or share memory.
        """
        view.check(file=self.file, name=key)
        return self._archive.stored(view)

    def _add(self, path: tuple[str, ...], value: object) -> None:
        if sum(map(len, path)) > _MAX_KEY_LENGTH:
            raise SourceError("a key too long to be a name", file=self.file, found=f"{path[-1][:40]!r} ...")
        key = ".".join(path)
        if not isinstance(value, (TensorView, DTensor)):
            self.others.append(key)
            return
        if key in self._tensors:
            found = " and ".join("/".join(path) for path in (self.paths[key], path))
            fix = "Save the module's state_dict() alone"
            raise SourceError("two entries become one key", name=key, file=self.file, found=found, fix=fix)
        self._tensors[key], self.paths[key] = value, path

    def _walk(self, content: dict[object, object], max_entries: int) -> Iterator[_Entry]:
        """Yield what the dicts in dicts hold, in order. A pickle can put a dict into itself, so that they never end."""
        levels: list[Iterator[_Entry]] = [iter([((), content)])]
        for _ in range(2 * max_entries):
            entry = next(levels[-1], None)
            if entry is None:
                levels.pop()
                if not levels:
                    return
                continue
            path, value = entry
            if not isinstance(value, dict):
                yield entry
            elif len(levels) > _MAX_DEPTH:
                break
            else:
                levels.append(iter([((*path, _text(key)), inner) for key, inner in value.items()]))
        raise SourceError("dicts nested too deep", file=self.file, fix="Save the module's state_dict()")


def _text(key: object) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, int) else f"<{type(key).__name__}>"


def locator(files: DataFiles) -> Callable[[StoredTensor, Box, Place], Located]:
    """Return what finds the elements of tensors in state files, and remembers where it found them."""
    find = lru_cache(_MAX_LOCATED)(partial(locate_view, files))

    def locate(_tensor: StoredTensor, _box: Box, place: Place) -> Located:
        assert isinstance(place, StoredView)
        return files, find(place)

    return locate
