"""The comparing sink by itself: which bytes count as different, and what is said of them."""

import json
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_export.errors import ComparisonError
from fsdp_export.plan import Plan
from fsdp_export.sinks import compare, compare_values
from fsdp_export.sinks.verify import VerifySink
from fsdp_export.sources.hf_folder import HfFolderSource
from fsdp_export.spec import Sharding, TensorSpec
from fsdp_export.steps import Piece, copy_step
from fsdp_export.verification import Difference

BITS = torch.arange(240, dtype=torch.uint8)
TENSORS = {
    "w": torch.randn(7, 5),
    "half": torch.randn(3, 2, 4).bfloat16(),
    "double": torch.randn(4, 3, dtype=torch.float64),
    "scalar": torch.tensor(2**40 + 1),
    "empty": torch.zeros(0, 5),
    "flags": torch.rand(9) > 0.5,
    "phase": torch.tensor([1 + 2j, 3 - 1j]),
    "bytes": BITS.view(5, 48),
    # Every pattern of bits, NaNs among them.
    "fp8": BITS.view(torch.float8_e4m3fn).view(48, 5),
    "nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
}


def plan_of(tensors):
    alone = Sharding.replicated((0,))
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype, alone) for name, tensor in tensors.items()]
    return Plan(tuple(map(copy_step, specs)))


def pieces_of(tensors, num_rows=1, seed=0):
    """Cut tensors into rows, in any order."""
    cut = []
    for info in plan_of(tensors).outputs:
        tensor = tensors[info.name]
        starts = range(0, len(tensor), num_rows) if tensor.dim() else ()
        cut += [Piece(info, row, tensor[row : row + num_rows]) for row in starts]
        cut += [] if tensor.dim() else [Piece(info, 0, tensor)]
    random.Random(seed).shuffle(cut)
    return cut


def written(folder, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / name)
    return folder


def opened(folder, tensors):
    sink = VerifySink(folder, lambda: HfFolderSource(folder))
    sink.open(plan_of(tensors), 0, "")
    return sink


def compared(folder, tensors, given=None):
    """Compare a folder with tensors as the walk does."""
    sink = opened(folder, tensors)
    for piece in pieces_of(tensors) if given is None else given:
        sink.write(piece)
    sink.close()
    return sink.verification([sink.card()], 1.0)


@pytest.mark.parametrize("num_rows", [1, 2, 100])
def test_the_same_bytes_are_equal_whatever_they_mean(num_rows, tmp_path):
    verification = compared(written(tmp_path, TENSORS), TENSORS, pieces_of(TENSORS, num_rows))
    assert verification.is_equal
    assert verification.error() is None
    assert verification.lines() == ["verified 10 tensors, 813 B: all equal; no record tells of other files"]


@pytest.mark.parametrize("name", sorted(TENSORS.keys() - {"empty"}))
def test_every_bit_counts(name, tmp_path):
    folder = written(tmp_path, TENSORS)
    draw = random.Random(name)
    for _ in range(8):
        changed = TENSORS[name].clone().contiguous()
        element = draw.randrange(changed.numel())
        bits = changed.reshape(-1).view(torch.uint8)
        # Of a bool, another bit would be no bool.
        byte = element * changed.dtype.itemsize + draw.randrange(changed.dtype.itemsize)
        bits[byte] ^= 1 if changed.dtype == torch.bool else 1 << draw.randrange(8)
        changed = bits.view(changed.dtype).view(changed.shape)
        (difference,) = compared(folder, {**TENSORS, name: changed}).differences
        index = torch.unravel_index(torch.tensor(element), changed.shape) if changed.dim() else ()
        assert difference.kind == "values"
        assert (difference.name, difference.file) == (name, str(folder / "model.safetensors"))
        assert difference.index == tuple(map(int, index))
        assert (difference.num_differing, difference.num_values) == (1, changed.numel())
        assert difference.expected == str(changed[tuple(index)].item())
        assert difference.found == str(TENSORS[name][tuple(index)].item())


def test_a_dtype_of_pairs_is_told_in_bytes(tmp_path):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("a torch without float4")
    header = {"packed": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(8)))
    changed = torch.arange(8, dtype=torch.uint8)
    assert compared(tmp_path, {"packed": changed.view(2, 4).view(torch.float4_e2m1fn_x2)}).is_equal
    changed[5] = 0xFF
    (difference,) = compared(tmp_path, {"packed": changed.view(2, 4).view(torch.float4_e2m1fn_x2)}).differences
    assert (difference.index, difference.expected, difference.found) == ((1, 1), "0xff", "0x05")


@pytest.mark.parametrize(("chunk_bytes", "block"), [(1, 7), (100, 1), (4 << 20, 7), (4 << 20, 1 << 18)])
def test_values_are_counted_over_chunks_blocks_pieces_and_threads(chunk_bytes, block, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(compare_values, "_BLOCK_ELEMENTS", block)
    tensors = {"a": torch.randn(64, 11), "b": torch.zeros(3)}
    folder = written(tmp_path, tensors)
    changed = {"a": tensors["a"].clone(), "b": tensors["b"]}
    draw = random.Random(0)
    places = {(draw.randrange(64), draw.randrange(11)) for _ in range(200)}
    for number, place in enumerate(sorted(places)):
        changed["a"][place] += 1 + number / 7
    sink = opened(folder, changed)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(sink.write, pieces_of(changed, num_rows=3)))
    sink.close()
    (difference,) = sink.verification([sink.card()], 1.0).differences
    first = min(places)
    assert (difference.index, difference.num_differing, difference.num_values) == (first, len(places), 64 * 11)
    assert difference.largest == pytest.approx((changed["a"] - tensors["a"]).abs().max().item())
    assert str(difference) == (
        f"{len(places)} of 704 values differ for 'a' in {folder}/model.safetensors: "
        f"expected {changed['a'][first].item()} at {list(first)}, found {tensors['a'][first].item()}, "
        f"at most {difference.largest:.6g} apart"
    )


@pytest.mark.parametrize(
    ("expected", "found", "largest"),
    [(0.0, -0.0, 0.0), (1.0, math.nan, math.inf), (math.inf, 1.0, math.inf), (3.0, 1.0, 2.0), (2**-140, 0.0, 2**-140)],
)
def test_the_largest_difference(expected, found, largest, tmp_path):
    folder = written(tmp_path, {"a": torch.tensor([found, 1.0])})
    verification = compared(folder, {"a": torch.tensor([expected, 1.0])})
    (difference,) = verification.differences
    assert (difference.num_differing, difference.largest) == (1, largest)
    assert (" apart" in str(difference)) is math.isfinite(largest)
    (values,) = json.loads(json.dumps(verification.as_json(), allow_nan=False))["differences"]
    assert values["largest"] == (largest if math.isfinite(largest) else None)


def test_rows_that_begin_at_any_byte(tmp_path):
    memory = torch.arange(100, dtype=torch.uint8)
    tensors = {"a": memory[3:83]}
    folder = written(tmp_path, {"a": memory[3:83].clone()})
    assert compared(folder, tensors, pieces_of(tensors, num_rows=17)).is_equal
    memory[82] += 1
    (difference,) = compared(folder, tensors, pieces_of(tensors, num_rows=17)).differences
    assert difference.index == (79,)


def test_columns_that_are_not_contiguous(tmp_path):
    tensors = {"a": torch.randn(4, 6).t()}
    assert compared(written(tmp_path, tensors), tensors).is_equal


def test_names_shapes_and_dtypes_are_compared_before_a_byte_is_read(tmp_path):
    folder = written(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, 3), "extra": torch.ones(1).half()})
    tensors = {"a": torch.ones(3, dtype=torch.int32), "gone": torch.ones(4), "b": torch.ones(3, 2, dtype=torch.half)}
    verification = compared(folder, tensors)
    file = folder / "model.safetensors"
    assert verification.lines() == [
        f"another dtype for 'a' in {file}: expected [3] int32, found [3] float32",
        f"no tensor for 'gone' in {folder}: expected [4] float32",
        f"another shape for 'b' in {file}: expected [3, 2] float16, found [2, 3] float32",
        f"an unexpected tensor for 'extra' in {file}: found [1] float16",
    ]
    assert str(verification.error()) == (
        f"what was written differs from its source in {folder}: expected 3 equal tensors, found 4 that differ: "
        "a, gone, b, extra. Export again; if it differs again, suspect the disk or the memory of this machine."
    )
    assert verification.as_json()["differences"][1] == {
        "kind": "missing",
        "name": "gone",
        "file": str(folder),
        "expected": "[4] float32",
    }


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ComparisonError) as caught:
        opened(tmp_path, TENSORS)
    assert str(caught.value).startswith(
        f"what was written cannot be read back: no weights in safetensors in {tmp_path}"
    )


def test_a_file_that_ends_early_while_it_is_read(tmp_path):
    tensors = {"a": torch.ones(40), "b": torch.ones(4, 10)}
    file = written(tmp_path, tensors) / "model.safetensors"
    sink = opened(tmp_path, tensors)
    os.truncate(file, file.stat().st_size - 80)
    for piece in pieces_of(tensors):
        sink.write(piece)
    sink.close()
    (difference,) = sink.verification([sink.card()], 1.0).differences
    assert (difference.kind, difference.name) == ("unreadable", "b")
    assert str(difference).startswith(
        f"bytes that cannot be read back for 'b' in {file}: found a truncated data file in {file}"
    )


def test_the_first_differences_of_all_ranks_are_told_and_all_are_counted(tmp_path):
    """Two ranks compare halves of each tensor; they find 40 and 30 that differ, 15 of them the same."""
    tensors = {f"t{number:03}": torch.zeros(2, 2) for number in range(60)}
    folder = written(tmp_path, {**tensors, "x": torch.ones(1), "y": torch.ones(1)})
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    names = list(expected)
    for name in names[:40]:
        expected[name][0, 1] = 1
    for name in names[25:55]:
        expected[name][1, 0] = 3
    cards = []
    for row in (1, 0):
        sink = opened(folder, expected)
        for piece in pieces_of(expected):
            if piece.first_row == row:
                sink.write(piece)
        sink.close()
        cards.append(sink.card())
    verification = sink.verification([*cards, ""], 1.0)
    assert verification.num_differing == 55 + 2
    assert [difference.name for difference in verification.differences] == names[:20]
    *_, last = verification.lines()
    assert last == "and 37 more"
    assert "found 57 that differ: t000, t001, t002, t003, t004 and 52 more." in str(verification.error())
    later = {name: expected[name] for name in names[25:]}
    ranks = [
        compared(written(tmp_path, tensors), later, [p for p in pieces_of(later) if p.first_row == row])
        for row in (0, 1)
    ]
    both = [of_rank.differences[0] for of_rank in ranks]
    assert both[0].joined(both[1]) == both[1].joined(both[0])
    assert both[0].joined(both[1]) == Difference(
        "values", "t025", str(folder / "model.safetensors"), "1.0", "0.0", (0, 1), 2, 4, 3.0
    )


def test_the_kernel_is_asked_to_forget_the_files(tmp_path, monkeypatch):
    asked = []
    real = os.posix_fadvise

    def note(descriptor, *arguments):
        asked.append((Path(f"/proc/self/fd/{descriptor}").readlink(), *arguments))
        real(descriptor, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", note)
    assert compared(written(tmp_path, TENSORS), TENSORS).is_equal
    assert asked == [(tmp_path / "model.safetensors", 0, 0, os.POSIX_FADV_DONTNEED)]


def num_open():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_files_are_closed_whatever_happens(tmp_path):
    folder = written(tmp_path, TENSORS)
    before = num_open()
    sink = opened(folder, TENSORS)
    sink.write(pieces_of(TENSORS)[0])
    sink.abort()
    sink.abort()
    assert num_open() == before


@pytest.mark.parametrize(
    ("one", "other", "dtypes", "largest"),
    [
        (2**53 + 1, 2**53, ("int64", "int64"), 1),
        (2**62, 2**62 + 1, ("uint64", "int64"), 1),
        (2**64 - 1, 2**64 - 3, ("uint64", "uint64"), 2),
        (2**64 - 1, -1, ("uint64", "int64"), 2**64),
        (2**63 - 1, -1, ("int64", "int32"), 2**63),
        (-(2**63), 2**63 - 1, ("int64", "int64"), 2**64),
        (True, 255, ("bool", "uint8"), 254),
    ],
)
def test_integers_are_told_apart_exactly(one, other, dtypes, largest):
    def tensor(value, dtype):
        if dtype == "uint64":  # torch makes none above int64
            return torch.tensor([value - 2**64 if value >= 2**63 else value]).view(torch.uint64)
        return torch.tensor([value], dtype=getattr(torch, dtype))

    values = [tensor(value, dtype) for value, dtype in zip((one, other), dtypes, strict=True)]
    found = compare_values.values_that_differ((1,), 0, *values)
    assert found is not None
    assert (found["num_differing"], found["largest"]) == (1, largest)
    same = compare_values.values_that_differ((1,), 0, tensor(5, dtypes[0]), tensor(5, dtypes[1]))
    assert (same is None) == (dtypes[0] != "bool")
