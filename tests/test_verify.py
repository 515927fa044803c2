"""Reading back what was written: by the command, by the library, on one rank and on two."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from dcp_folders import put_together, save
from hf_folders import INDEX
from models import hf_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from fsdp_export import export_checkpoint
from fsdp_export.checkpoint import OpenedCheckpoint
from fsdp_export.cli import main
from fsdp_export.errors import ComparisonError, SourceError
from fsdp_export.opening import open_checkpoint
from fsdp_export.sources.dcp import DcpSource
from fsdp_export.sources.hf_folder import HfFolderSource

pytestmark = pytest.mark.usefixtures("environ")

FILE = "model.safetensors"
HEAD = "lm_head.weight"
TORCH = {"format": "pt"}
WEIGHT = torch.arange(40.0).view(8, 5) / 3
TENSORS = {"weight": WEIGHT, "bias": torch.arange(8.0), "count": torch.tensor(7)}


@pytest.fixture
def run(tmp_path):
    return save(tmp_path / "run/step-1", TENSORS)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory):
    """A tied model in float32, whose config wants bfloat16."""
    folder = tmp_path_factory.mktemp("tied")
    model = hf_model("qwen2-tied")
    save(folder / "step-1", {"model": model.state_dict()})
    model.to(torch.bfloat16).config.save_pretrained(folder)
    return folder


def call(*arguments, code=0):
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="fsdp-export")
    assert result.exit_code == code, (result.output, result.exception)
    return result


def rewritten(change):
    """Return what loads the weights of a folder, changes them and saves them again."""

    def spoil(out):
        tensors = load_file(out / FILE)
        save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, out / FILE, TORCH)

    return spoil


def flipped(out):
    """Flip the last bit of `weight[1, 1]`."""
    data = bytearray((out / FILE).read_bytes())
    place = data.index(WEIGHT.numpy().tobytes()) + 4 * 6
    data[place] ^= 1
    (out / FILE).write_bytes(data)


def truncated(out):
    os.truncate(out / FILE, 200)


def without_file(out):
    (out / FILE).unlink()


SWAPPED = torch.cat([WEIGHT[:3], WEIGHT[[4, 3]], WEIGHT[5:]])
ONE_BIT = torch.tensor(2.0).view(torch.int32).bitwise_xor(1).view(torch.float32).item()
SPOILT = [
    pytest.param(
        flipped,
        f"1 of 40 values differ for 'weight' in out/{FILE}: expected 2.0 at [1, 1], found {ONE_BIT}, "
        f"at most {ONE_BIT - 2.0:.6g} apart",
        "weight",
        id="bit",
    ),
    pytest.param(
        rewritten(lambda tensors: tensors | {"weight": SWAPPED}),
        f"10 of 40 values differ for 'weight' in out/{FILE}: expected 5.0 at [3, 0], found {WEIGHT[4, 0].item()}, "
        "at most 1.66667 apart",
        "weight",
        id="swapped-rows",
    ),
    pytest.param(
        rewritten(lambda tensors: tensors | {"bias": tensors["bias"].half()}),
        f"another dtype for 'bias' in out/{FILE}: expected [8] float32, found [8] float16",
        "bias",
        id="dtype",
    ),
    pytest.param(
        rewritten(lambda tensors: tensors | {"weight": WEIGHT.t()}),
        f"another shape for 'weight' in out/{FILE}: expected [8, 5] float32, found [5, 8] float32",
        "weight",
        id="shape",
    ),
    pytest.param(
        rewritten(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "count"}),
        "no tensor for 'count' in out: expected [] int64",
        "count",
        id="missing",
    ),
    pytest.param(
        rewritten(lambda tensors: tensors | {"more": torch.ones(2)}),
        f"an unexpected tensor for 'more' in out/{FILE}: found [2] float32",
        "more",
        id="unexpected",
    ),
]


def spoil_saves(environ, spoil):
    """Change what is written before it is verified."""
    real = OpenedCheckpoint.save

    def save_and_spoil(self, path, **choices):
        report = real(self, path, **choices)
        spoil(Path(path))
        return report

    environ.setattr(OpenedCheckpoint, "save", save_and_spoil)


def test_what_is_equal_is_said_last(run):
    result = call(run, "--out", "out", "--verify")
    *_, wrote, verified = result.stdout.splitlines()
    assert wrote.startswith("wrote 3 tensors")
    assert verified == "verified 3 tensors, 200 B: all equal"
    assert result.stderr == ""
    result = call(run, "--out", "out", "--verify", "--json")
    verified = json.loads(result.stdout)["verified"]
    assert verified.pop("seconds") > 0
    assert verified == {
        "equal": True,
        "tensors": 3,
        "bytes": 200,
        "error": None,
        "files": 0,
        "num_differing": 0,
        "differences": [],
    }
    assert call(run, "--out", "out", "--verify", "-q").output == ""
    assert "verified" not in json.loads(call(run, "--out", "out", "--json").stdout)


@pytest.mark.parametrize(("spoil", "line", "name"), SPOILT)
def test_a_difference_is_told_and_the_command_fails(spoil, line, name, run, environ):
    spoil_saves(environ, spoil)
    result = call(run, "--out", "out", "--verify", code=3)
    *_, wrote, last = result.stdout.splitlines()
    assert wrote.startswith("wrote 3 tensors")
    assert last == line
    error = (
        f"what was written differs from its source in out: expected 3 equal tensors, found 1 that differ: {name}. "
        "Export again; if it differs again, suspect the disk or the memory of this machine."
    )
    assert result.stderr == f"fsdp-export: {error}\n"
    result = call(run, "--out", "out", "--verify", "--json", "-q", code=3)
    verified = json.loads(result.stdout)["verified"]
    assert (verified["equal"], verified["num_differing"], verified["error"]) == (False, 1, error)
    assert [difference["name"] for difference in verified["differences"]] == [name]
    assert result.stderr == f"fsdp-export: {error}\n"


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        pytest.param(truncated, f"a truncated safetensors file in out/{FILE}: expected", id="truncated"),
        pytest.param(without_file, "no weights in safetensors in out: found fsdp_export.json", id="no-file"),
    ],
)
def test_what_cannot_be_read_back_fails_too(spoil, error, run, environ):
    spoil_saves(environ, spoil)
    message = f"what was written cannot be read back: {error}"
    result = call(run, "--out", "out", "--verify", code=3)
    assert result.stderr.startswith(f"fsdp-export: {message}")
    result = call(run, "--out", "out", "--verify", "--json", code=3)
    verified = json.loads(result.stdout)["verified"]
    assert verified["equal"] is False
    assert verified["error"].startswith(message)
    with pytest.raises(ComparisonError) as caught:
        export_checkpoint(run, "out", verify=True)
    assert str(caught.value).startswith(message)


def test_an_index_that_does_not_agree_with_its_files(tied_run, environ):
    def misplace(out):
        index = json.loads((out / INDEX).read_text())
        files = index["weight_map"]
        files["model.norm.weight"] = next(file for file in files.values() if file != files["model.norm.weight"])
        (out / INDEX).write_text(json.dumps(index))

    spoil_saves(environ, misplace)
    result = call(tied_run, "--out", "out", "--verify", "--max-shard-size", "4KB", code=3)
    assert result.stderr.startswith(
        f"fsdp-export: what was written cannot be read back: tensors that the index lists and its files do not have in "
        f"out/{INDEX}: found 'model.norm.weight' ("
    )


def test_no_smoke_test_of_what_differs(tied_run, environ):
    def spoil(out):
        save_file(load_file(out / FILE) | {"model.norm.weight": torch.zeros(16)}, out / FILE)

    spoil_saves(environ, spoil)
    result = call(tied_run, "--out", "out", "--verify", "--smoke-test", "a", "--json", code=3)
    assert "smoke_test" not in json.loads(result.stdout)


@pytest.mark.parametrize(
    "choices", [("--dtype", "keep"), (), ("--max-shard-size", "4KB"), ("--dtype", "fp16")], ids=str
)
def test_casts_ties_and_several_files_are_compared_as_they_are_written(choices, tied_run, environ):
    verified = call(tied_run, "--out", "out", "--verify", *choices).stdout.splitlines()[-1]
    written = {name: tensor for path in Path("out").glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert HEAD not in written
    num_bytes = sum(tensor.nbytes for tensor in written.values())
    others = f"{1 + (choices[-1:] == ('4KB',))} other file{'s' * (choices[-1:] == ('4KB',))} as written"
    assert verified == f"verified 26 tensors, {num_bytes / 1000:.3g} kB: all equal, and {others}"
    # As the oracle has it, the last value of the last tensor is wrong now.
    opened = open_checkpoint(
        tied_run, dtype={"keep": "keep", "fp16": "fp16"}.get(choices[-1] if choices else "", "auto")
    )
    (path,) = (path for path in Path("out").glob("*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(path)
    tensors["model.norm.weight"][-1] = 0
    save_file(tensors, path, TORCH)
    verification = opened.verify("out")
    (difference,) = verification.differences
    assert (difference.name, difference.file, difference.index) == ("model.norm.weight", str(path), (15,))
    assert (difference.expected, difference.found, difference.largest) == ("1.0", "0.0", 1.0)


def test_only_what_was_chosen_is_compared(run):
    call(run, "--out", "out", "--verify", "--include", "weight", "--include", "bias", "--exclude", "bias")
    assert open_checkpoint(run, include=["weight"]).verify("out").is_equal
    verification = open_checkpoint(run).verify("out")
    assert [(each.kind, each.name) for each in verification.differences] == [("missing", "bias"), ("missing", "count")]
    verification = open_checkpoint(run, include=["count"]).verify("out")
    kinds = [(each.kind, each.name) for each in verification.differences]
    assert kinds == [("missing", "count"), ("unexpected", "weight")]


def test_the_library_reports_what_is_equal_and_raises_what_is_not(run, environ):
    report = export_checkpoint(run, "out", verify=True)
    assert report.verification.is_equal
    assert report.lines()[-1] == "verified 3 tensors, 200 B: all equal"
    assert export_checkpoint(run, "out").verification is None
    before = (Path("out") / FILE).read_bytes()
    spoil_saves(environ, flipped)
    with pytest.raises(ComparisonError, match="found 1 that differ: weight"):
        export_checkpoint(run, "out", verify=True)
    # It is there to be looked at.
    assert sum(one != other for one, other in zip((Path("out") / FILE).read_bytes(), before, strict=True)) == 1


def test_shards_beside_what_was_written_are_not_read(run):
    """Folders of shards attract whoever reads a Hugging Face folder, for they may be more complete."""
    call(run, "--out", "out", "--dtype", "fp16")
    Path("out/sharded").mkdir()
    metadata = {
        "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [0] * t.dim()} for name, t in TENSORS.items()})
    }
    save_file(TENSORS, "out/sharded/shard-00001-model-00001-of-00001.safetensors", metadata=metadata)
    assert HfFolderSource(Path("out")).specs[0].dtype == torch.float32
    assert open_checkpoint(run, dtype="fp16").verify("out").is_equal


def test_a_source_that_cannot_be_read_is_no_difference(run):
    call(run, "--out", "out")
    opened = open_checkpoint(run)
    (data,) = run.glob("*.distcp")
    os.truncate(data, 100)
    with pytest.raises(SourceError):
        opened.verify("out")


def test_never_more_than_a_chunk_is_read(environ):
    """Of both sides, whatever the size of a tensor."""
    environ.setattr("fsdp_export.walk.CHUNK_BYTES", 4096)
    environ.setattr("fsdp_export.sinks.compare._CHUNK_BYTES", 1024)
    put_together(Path("run"), {"weight": torch.arange(100_000.0).view(1000, 100)})
    call("run", "--out", "out")
    sizes = {DcpSource: [], HfFolderSource: []}
    for reader, read in sizes.items():

        def rows(self, spec, first, stop, real=reader.rows, read=read):
            tensor = real(self, spec, first, stop)
            read.append(tensor.nbytes)
            return tensor

        environ.setattr(reader, "rows", rows)
    assert open_checkpoint("run").verify("out").is_equal
    assert [sum(read) for read in sizes.values()] == [400_000, 400_000]
    assert [max(read) for read in sizes.values()] == [4000, 800]


def _verify_on_two_ranks(run):
    opened = open_checkpoint(run, ranks=(0, 1), rank=dist.get_rank())
    compared = []
    verification = opened.verify("out", delivered=compared.append)
    return sum(compared), verification


def _without_time(verification):
    return {key: value for key, value in verification.as_json().items() if key != "seconds"}


def test_two_ranks_share_the_comparison_and_return_the_same(tmp_path):
    tensors = {f"t{number:02}": torch.randn(64, 8) for number in range(30)}
    run = save(tmp_path / "run/step-1", tensors)
    call(run, "--out", "out")
    shares, (one, other) = zip(*run_ranks(_verify_on_two_ranks, 2, run), strict=True)
    assert sum(shares) == one.num_bytes == 30 * 64 * 8 * 4
    assert min(shares) > one.num_bytes / 3
    assert one.is_equal
    assert _without_time(one) == _without_time(other) == _without_time(open_checkpoint(run).verify("out"))
    # One difference in what each rank reads.
    tensors["t00"][63, 7] += 1
    tensors["t29"][0, 0] += 1
    save_file(tensors | {"more": torch.ones(1)}, "out/model.safetensors", TORCH)
    _, (one, other) = zip(*run_ranks(_verify_on_two_ranks, 2, run), strict=True)
    assert [(each.kind, each.name) for each in one.differences] == [
        ("values", "t00"),
        ("values", "t29"),
        ("unexpected", "more"),
    ]
    assert one.num_differing == 3
    assert _without_time(one) == _without_time(other) == _without_time(open_checkpoint(run).verify("out"))


def test_a_folder_that_one_rank_cannot_read_fails_on_both(run):
    call(run, "--out", "out")
    Path("empty").mkdir()

    def verify():
        rank = dist.get_rank()
        opened = open_checkpoint(run, ranks=(0, 1), rank=rank)
        return opened.verify("empty" if rank else "out").error()

    one, other = run_ranks(verify, 2)
    assert str(one) == str(other)
    assert str(one).startswith("rank 1 (")
    assert "what was written cannot be read back: no weights in safetensors in empty" in str(one)
