import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_export.errors import SourceError, UnsafeInputError
from fsdp_export.sources.unpickle import Call, Kind, Record, Refusal, unpickle

FILE = "/ckpt/.metadata"

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=plain, protocol=st.sampled_from([3, 4, 5]))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    read = unpickle(pickle.dumps(value, protocol), {}, file=FILE)
    assert read == value
    assert repr(read) == repr(value)


def test_long_texts_and_lists_are_read_in_every_protocol() -> None:
    value = {"name" * 100: list(range(3000)), "same": ["x" * 300] * 3, "wide": (1, 2, 3, 4), "numbers": (-1, 2**40)}
    for protocol in (2, 3, 4, 5):
        assert unpickle(pickle.dumps(value, protocol), {}, file=FILE) == value


def test_a_kind_becomes_a_record_of_its_state() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    chunk = ChunkStorageMetadata(torch.Size([1, 2]), torch.Size([3, 4]))
    names = {
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": Kind("chunk"),
        "torch.Size": Call(tuple),
    }
    for protocol in (2, 4, 5):
        one, other = unpickle(pickle.dumps([chunk, chunk], protocol), names, file=FILE)
        assert one is other
        assert isinstance(one, Record)
        assert (one.kind, one.state) == ("chunk", {"offsets": (1, 2), "sizes": (3, 4)})


def test_a_function_of_ours_makes_what_python_makes_of_a_tuple_with_names() -> None:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(torch.Size([1, 2]), (2, 1), torch.float32)
    names = {
        "torch.distributed.tensor._dtensor_spec.TensorMeta": Call(lambda *values: values),
        "torch.Size": Call(tuple),
        "torch.float32": torch.float32,
    }
    for protocol in (2, 4, 5):
        assert unpickle(pickle.dumps(meta, protocol), names, file=FILE) == ((1, 2), (2, 1), torch.float32)


def test_attributes_of_a_dict_are_dropped() -> None:
    numbers = OrderedDict(a=1, b=2)
    vars(numbers)["_metadata"] = {"version": 2}  # as in the state dict of a module
    for protocol in (2, 4, 5):
        names = {"collections.OrderedDict": Call(dict)}
        assert unpickle(pickle.dumps(numbers, protocol), names, file=FILE) == dict(numbers)


def test_a_name_of_a_format_that_is_not_read_is_refused_with_the_reason() -> None:
    names = {"pathlib.PurePosixPath": Refusal("paths", "Save texts")}
    with pytest.raises(SourceError) as caught:
        unpickle(b"\x80\x04cpathlib\nPurePosixPath\n.", names, file=FILE, name="w")
    assert str(caught.value) == f"paths for 'w' in {FILE}. Save texts."
    assert not isinstance(caught.value, UnsafeInputError)


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda trace: Calls(os.system, f"touch {trace}"), "posix.system"),
        (lambda trace: Calls(eval, f"open({str(trace)!r}, 'w')"), "(builtins|__builtin__).eval"),
        (lambda trace: Calls(setattr, trace, "name", 1), "(builtins|__builtin__).setattr"),
        (Path, r"pathlib(\._local)?.PosixPath"),
    ],
    ids=["system", "eval", "setattr", "harmless"],
)
def test_a_foreign_name_is_refused_before_anything_runs(call: Any, name: str, protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(call(tmp_path / "ran"), protocol)
    with pytest.raises(UnsafeInputError, match=rf"names {name} \(nothing of it was run\) in {FILE}\."):
        unpickle(data, {}, file=FILE)
    assert not (tmp_path / "ran").exists()


def test_a_foreign_name_written_by_hand_is_refused() -> None:
    with pytest.raises(UnsafeInputError, match=r"names os\.system "):
        unpickle(b"cos\nsystem\n(S'true'\ntR.", {}, file=FILE)
    with pytest.raises(UnsafeInputError, match=r"names 'os.\\nsys\\x1btem' "):
        unpickle(b"\x80\x04\x8c\x02os\x8c\x08\nsys\x1btem\x93.", {}, file=FILE)


def test_a_pickle_that_python_would_run_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Calls(os.system, f"touch {tmp_path / 'ran'}")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an early end before byte 0"),
        (b"\x80\x04", "an early end before byte 2"),
        (b"\x80\x63.", "protocol 99 before byte 2"),
        (b"\x80\x04.", "IndexError before byte 3"),
        (b"\x80\x04h\x07.", "KeyError before byte 4"),
        (b"\x80\x04\x8c\xff.", "an early end before byte 4"),
        (b"\x80\x04\x8c\x01\xff.", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte before"),
        (b"\x80\x04(i__main__\nX\n.", "opcode 0x69, which no checkpoint uses, before byte 4"),
        (b"\x80\x04\x82\x01.", "opcode 0x82, which no checkpoint uses, before byte 3"),
        (b"\x80\x04N)R.", "a call of what is no function before byte 5"),
        (b"\x80\x04cx\nsize\nN\x85R.", "TypeError before byte 13"),
        (b"\x80\x04N)\x81.", "an instance of what is no class before byte 5"),
        (b"\x80\x04cx\nkind\nN\x85\x81.", "an instance of what is no class before byte 13"),
        (b"\x80\x04]}b.", "a state of what has none before byte 5"),
        (b"\x80\x04cx\nkind\n}b.", "a state of what has none before byte 12"),
        (b"\x80\x04cx\nkind\n)\x81}b}b.", "a state of what has none before byte 16"),
        (b"\x80\x04}Na.", "items of what is no list before byte 5"),
        (b"\x80\x04]NNs.", "items of what is no dict before byte 6"),
        (b"\x80\x04}]Ns.", "a key that is no text before byte 6"),
        (b"\x80\x04}(NNNu.", "a key that is no text before byte 8"),
        (b"\x80\x04}(K\x01u.", "zip() argument 2 is shorter than argument 1 before byte 7"),
        (b"\x80\x04N\x86.", "a tuple of what is not there before byte 4"),
        (b"\x80\x04NQ.", "a persistent id before byte 4"),
        (b"\x80\x04NN\x93.", "a name that is no text before byte 5"),
        (b"\x80\x04t.", "IndexError before byte 3"),
        (b"\x80\x04cx", "subsection not found before byte 3"),
        (b"\x80\x04\x95\x03\0\0\0\0\0\0\0N.", "a frame that ends too early before byte 13"),
        (b"\x80\x04\x95\x02\0\0\0\0\0\0\0N\x95\x02\0\0\0\0\0\0\0N.", "a frame that ends too early before byte 13"),
        (b"\x80\x04cx\nsize\n(" + b"N" * 1001 + b"tR.", "a call with too many arguments before byte 1,014"),
        (b"\x80\x04cx\nsize\n](" + b"N" * 1001 + b"e\x85R.", "a call with too many arguments before byte 1,016"),
        (b"\x80\x04](" + b"N" * 200 + b"e\x94" + b"h\0" * 30 + b"t.", "lists that are repeated too often before byte"),
    ],
    ids=repr,
)
def test_a_damaged_pickle_is_refused(data: bytes, found: str) -> None:
    with pytest.raises(SourceError) as caught:
        unpickle(data, {"x.size": Call(tuple), "x.kind": Kind("kind")}, file=FILE)
    assert f"a damaged pickle in {FILE}: found {found}" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b")" + b"\x85" * 1_500_000 + b".",
        b"\x80\x04}" + b")" + b"\x85" * 1_500_000 + b"Ns.",
        b"\x80\x04" + b"]" * 900_000 + b"a" * 899_999 + b".",
        b"\x80\x04" + b"(" * 1_500_000 + b"t" * 1_500_000 + b".",
        b"\x80\x04" + b"}" * 1_500_000 + b".",
        b"\x80\x04" + b"]\x94h\x00a" * 100_000 + b".",
        b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
        b"\x80\x04B\xff\xff\xff\xff.",
    ],
    ids=["tuples", "key", "lists", "marks", "stack", "memo", "memo index", "long", "bytes"],
)
def test_a_pickle_made_to_exhaust_its_reader_does_not(data: bytes) -> None:
    try:
        unpickle(data, {}, file=FILE)
    except SourceError as error:
        assert not isinstance(error, UnsafeInputError)  # noqa: PT017
