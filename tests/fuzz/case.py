"""An input that is being made: a copy of a seed, changed at random, always in the same way for the same number."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzz.seeds import Seed

__all__ = ["NUMBERS", "Case", "Mutator"]

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**62,
    2**63,
    2**64 - 1,
)
"""Numbers at which readers go wrong."""

# What the libraries raise that the mutators use, where an earlier change has left no archive and no JSON.
_EARLIER_CHANGES = (zipfile.BadZipFile, EOFError, NotImplementedError, RecursionError, RuntimeError, ValueError)


@dataclass
class Case:
    """A copy of a seed in a folder.

    Attributes:
        draw: What decides.
        seed: The seed.
        seeds: All seeds, whose files may be mixed in.
        folder: Where the copy lies.
        names_code: Whether a pickle that will be read names a function that no checkpoint needs, if nothing else is
            changed.
        notes: What was changed.
        is_rewritten: Whether it may have become another sound checkpoint, rather than a damaged one.
        is_of_two: Whether files of another checkpoint may be read in its place.
        is_unprivileged: Whether it must be read by a user who does not own it.
    """

    draw: Random
    seed: Seed
    seeds: Sequence[Seed]
    folder: Path
    names_code: bool = False
    notes: list[str] = field(default_factory=list)
    is_rewritten: bool = False
    is_of_two: bool = False
    is_unprivileged: bool = False

    def write_seed(self) -> None:
        """Write the copy."""
        for name, content in self.seed.files.items():
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def mutate(self, mutators: Sequence[Mutator]) -> None:
        """Change it, mostly once."""
        for _ in range(self.draw.choice((1, 1, 1, 1, 2, 4))):
            for _ in range(20):
                mutator, note = self.draw.choice(mutators), None
                with suppress(*_EARLIER_CHANGES):
                    note = mutator(self)
                if note is not None:
                    self.is_rewritten |= not mutator.__module__.endswith("damage")
                    self.notes.append(f"{mutator.__name__}: {note}")
                    break

    def paths(self) -> list[str]:
        """Return the names of all files, relative to the folder, in order."""
        found: list[str] = []
        for parent, _, names in os.walk(self.folder):
            found += [str((Path(parent) / name).relative_to(self.folder)) for name in names]
        return sorted(found)

    def pick_file(self, suits: Callable[[str, bytes], object] = lambda _name, _data: True) -> tuple[str, bytes] | None:
        """Choose a regular file."""
        names = self.paths()
        self.draw.shuffle(names)
        for name in names:
            path = self.folder / name
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                data = path.read_bytes()
                if suits(name, data):
                    return name, data
        return None

    def write(self, name: str, data: bytes | bytearray) -> None:
        (self.folder / name).write_bytes(data)

    def foreign_file(self) -> tuple[str, bytes]:
        """Choose a file of any seed."""
        seed = self.draw.choice(self.seeds)
        name = self.draw.choice(list(seed.files))
        return f"{seed.name}/{name}", seed.files[name]

    def remove(self) -> None:
        """Remove the copy, whatever has become of it."""
        self.folder.chmod(0o755)
        for parent, folders, _ in os.walk(self.folder):
            for path in (Path(parent) / name for name in folders):
                if not path.is_symlink():
                    path.chmod(0o755)
        shutil.rmtree(self.folder)


Mutator = Callable[[Case], "str | None"]
"""Changes a case and says what it did; does nothing and returns None where it does not apply."""
