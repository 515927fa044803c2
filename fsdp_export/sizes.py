"""What counts as a size of files. Needs no torch, so that the command can check it at once."""

from __future__ import annotations

import re

__all__ = ["is_size"]

_SIZE = re.compile(r"(?=.*[1-9])\d{1,18}(\.\d+)?\s*[KMGT]B|0*[1-9]\d{0,18}", re.IGNORECASE)


def is_size(text: str) -> bool:
    """Tell whether a text is a positive number of bytes, plain or decimal with KB, MB, GB or TB."""
    return _SIZE.fullmatch(text) is not None
