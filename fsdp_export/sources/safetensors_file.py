"""The header of a safetensors file, read strictly: which tensors it has, and at which bytes.

Format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors without gaps up to the end
of the file (https://github.com/huggingface/safetensors). What the library refuses is refused here, with the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..errors import COPY_AGAIN, SourceError
from .archive import DataFiles, Place, Strided, is_possible

__all__ = ["Entry", "Header", "dense", "parse_json", "read_header"]

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"

# Names that an older torch lacks are left out. F6_E2M3 and F6_E3M2 no torch has.
_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F4": "float4_e2m1fn_x2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }.items()
    if hasattr(torch, name)
}
_PACKED = 2  # F4 counts numbers, torch's dtype pairs of them


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape, in elements of that dtype.
        place: Its bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself.

    Attributes:
        entries: Its tensors by name, in the order of their bytes.
        starts: Where in the full tensors torch's writer cut these out; None where it does not say, as elsewhere.
    """

    entries: Mapping[str, Entry]
    starts: Mapping[str, tuple[int, ...]] | None


def dense(file: str, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Strided:
    """Return where the elements of a contiguous tensor are."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return Strided(file, offset, dtype, shape, tuple(strides))


def parse_json(data: bytes) -> Any:
    """Read JSON in which no key stands twice and every number is one.

    Raises:
        ValueError: It is something else, or too deep to be anything.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key that stands twice")
    return content


def _no_number(text: str) -> float:
    raise ValueError(f"{text}, which is no number of JSON")


def read_header(files: DataFiles, file: str, begin: int = 0) -> Header:
    """Read the header of a safetensors file, or of one that begins inside another file and ends with it.

    Args:
        files: The folder's files.
        file: The file.
        begin: Byte at which it begins.

    Raises:
        SourceError: It is truncated or damaged, or has a dtype that torch does not have.
    """
    return _Reader(files, file, begin).header()


class _Reader:
    def __init__(self, files: DataFiles, file: str, begin: int) -> None:
        self.files, self.file, self.begin = files, file, begin
        self.num_bytes = files.size(file) - begin
        self.header_bytes = 0

    def header(self) -> Header:
        content = self.read_json()
        metadata = content.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self.error(f"{_METADATA} that is no table of texts")
        entries = {name: self.entry(name, value) for name, value in content.items()}
        ordered = sorted(entries.items(), key=lambda item: (item[1].place.offset, item[1].place.length))
        self.check_gapless(ordered)
        return Header(dict(ordered), self.starts(metadata, entries))

    def read_json(self) -> dict[str, Any]:
        if self.num_bytes < _LENGTH_BYTES:
            raise self.truncated(f"at least {_LENGTH_BYTES} bytes")
        length = int.from_bytes(self.files.read(self.file, self.begin, _LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise SourceError(
                "no safetensors header",
                file=self.files.folder / self.file,
                expected=f"at most {_MAX_HEADER_BYTES:,} bytes",
                found=f"a length of {length:,}",
                fix=COPY_AGAIN,
            )
        self.header_bytes = _LENGTH_BYTES + length
        if self.num_bytes < self.header_bytes:
            raise self.truncated(f"at least {self.header_bytes:,} bytes")
        data = self.files.read(self.file, self.begin + _LENGTH_BYTES, length)
        try:
            if data[:1] != b"{":
                raise ValueError("no { at its begin")  # noqa: TRY301 - as what json says of the rest
            content = parse_json(data)
            if not _are_texts(content):
                raise ValueError("a name that is no text")  # noqa: TRY301 - see above
        except ValueError as error:
            raise self.error(error) from error
        return dict(content)

    def entry(self, name: str, value: object) -> Entry:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self.error("no dtype, shape and data_offsets", name)
        code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
            raise self.error("a shape or data_offsets that are no counts", name)
        if not isinstance(code, str) or code not in _DTYPES:
            what = "a dtype that this torch does not have"
            file = self.files.folder / self.file
            raise SourceError(what, name=name, file=file, found=repr(code), fix="Update torch")
        if not is_possible(shape):
            raise self.error("a shape larger than any tensor", name)
        dtype = _DTYPES[code]
        if code == "F4":
            if not shape or shape[-1] % _PACKED:
                raise self.error(f"an odd number of {code} in a row", name)
            shape = [*shape[:-1], shape[-1] // _PACKED]
        length = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != length:
            raise self.error(f"data_offsets {offsets} of a tensor of {length:,} bytes", name)
        return Entry(dtype, tuple(shape), Place(self.file, self.begin + self.header_bytes + offsets[0], length))

    def check_gapless(self, ordered: list[tuple[str, Entry]]) -> None:
        """Refuse tensors that overlap, leave bytes between them, or end before or behind the file."""
        position, before = self.begin + self.header_bytes, ""
        for name, entry in ordered:
            offset = entry.place.offset
            if offset < position:
                raise self.error(f"{position - offset:,} bytes that {before!r} has, too", name)
            if offset > position:
                raise self.error(f"{offset - position:,} bytes before it that no tensor has", name)
            position, before = offset + entry.place.length, name
        surplus = self.begin + self.num_bytes - position
        if surplus < 0:
            raise self.truncated(f"{position - self.begin:,} bytes")
        if surplus:
            raise self.error(f"{surplus:,} bytes at the end that no tensor has")

    def starts(self, metadata: dict[str, str], entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]] | None:
        if _SHARDING not in metadata:
            return None
        try:
            content = parse_json(metadata[_SHARDING].encode())
        except ValueError as error:
            raise self.error(f"{_SHARDING} with {error}") from error
        starts = {}
        for name, entry in entries.items():
            info = content.get(name) if isinstance(content, dict) else None
            offsets = info.get("saved_offsets") if isinstance(info, dict) else None
            if not _are_counts(offsets) or len(offsets) != len(entry.shape) or not _is_inside(offsets, entry.shape):
                raise self.error(f"no saved_offsets of it in {_SHARDING}", name)
            starts[name] = tuple(offsets)
        return starts

    def truncated(self, expected: str) -> SourceError:
        file, found = self.files.folder / self.file, f"{max(self.num_bytes, 0):,}"
        return SourceError("a truncated safetensors file", file=file, expected=expected, found=found, fix=COPY_AGAIN)

    def error(self, found: object, name: str | None = None) -> SourceError:
        file = self.files.folder / self.file
        return SourceError("a damaged safetensors header", name=name, file=file, found=found, fix=COPY_AGAIN)


def _are_texts(names: Iterable[str]) -> bool:
    """Tell whether names can be written; JSON can spell halves of characters."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_inside(offsets: list[int], shape: tuple[int, ...]) -> bool:
    """Tell whether there can be a tensor of which a block at these offsets is a part."""
    return is_possible([offset + size for offset, size in zip(offsets, shape, strict=True)])


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Tell whether a value is a list of numbers of bytes, rows or elements that can be."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
