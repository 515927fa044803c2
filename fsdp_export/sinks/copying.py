"""Bytes from one file into another."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from ..errors import truncated_file, unreadable_file
from ..steps import Extent

__all__ = ["copy_bytes"]

# The kernel copies pages that lie alike in both files; others cost it more than reading and writing.
_PAGE_BYTES = 4096
_BUFFER_BYTES = 128 << 10
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def copy_bytes(extent: Extent, target: int, offset: int) -> None:
    """Copy bytes of a file into another: in the kernel where it is good at it, which may then share the blocks.

    Args:
        extent: What to copy.
        target: Descriptor of the file to write.
        offset: Where in it the bytes go.

    Raises:
        SourceError: The extent's file cannot be read, or is shorter.
        OSError: The other one cannot be written.
    """
    with ExitStack() as stack:
        try:
            source = stack.enter_context(extent.opened())
        except OSError as error:
            raise unreadable_file(extent.file, error) from error
        is_alike = (extent.offset - offset) % _PAGE_BYTES == 0
        done = _copy_in_kernel(extent, source, target, offset) if is_alike else 0
        if done < extent.num_bytes:
            _copy_through_memory(extent, source, target, offset, done)


def _copy_in_kernel(extent: Extent, source: int, target: int, offset: int) -> int:
    """Copy as much as the kernel will; return how much that is."""
    done = 0
    while done < extent.num_bytes:
        try:
            rest = extent.num_bytes - done
            count = os.copy_file_range(source, target, rest, extent.offset + done, offset + done)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            return done  # what is wrong, if anything is, shows as it is read or written
        if not count:
            break
        done += count
    return done


def _copy_through_memory(extent: Extent, source: int, target: int, offset: int, done: int) -> None:
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, extent.num_bytes - done)))
    while done < extent.num_bytes:
        room = min(extent.num_bytes - done, _BUFFER_BYTES - (offset + done) % _BUFFER_BYTES)
        try:
            count = os.preadv(source, [buffer[:room]], extent.offset + done)
        except OSError as error:
            raise unreadable_file(extent.file, error) from error
        if not count:
            raise truncated_file(extent.file, extent.offset + extent.num_bytes, extent.offset + done)
        written = 0
        while written < count:
            written += os.pwrite(target, buffer[written:count], offset + done + written)
        done += count
