"""Two checkpoints compared, in any layouts: by the command, by the library, on one rank and on two."""

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from dcp_folders import put_together, save
from hub_models import hub_model, trained
from models import hf_model
from rank_folders import cut, put_ranks
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import fsdp_export
from fsdp_export import compare_checkpoints, export_checkpoint
from fsdp_export.cli import main
from fsdp_export.comparing import open_two
from fsdp_export.errors import NotFoundError, SourceError, UnsafeInputError, UsageError
from fsdp_export.sinks.pairing import pair
from fsdp_export.sources.dcp import DcpSource
from fsdp_export.sources.hf_folder import HfFolderSource
from fsdp_export.spec import TensorInfo

pytestmark = pytest.mark.usefixtures("environ")

FILE = "model.safetensors"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
WEIGHT = torch.arange(40.0).view(8, 5) / 3
TENSORS = {"weight": WEIGHT, "bias": torch.arange(8.0), "count": torch.tensor(7)}


def call(*arguments, code=0):
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="fsdp-export")
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refusal(*arguments, code):
    result = call(*arguments, code=code)
    assert isinstance(result.exception, SystemExit)
    *_, message = result.stderr.splitlines()
    return message.removeprefix("fsdp-export: ")


def one_file(folder, tensors):
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, Path(folder, FILE))
    return Path(folder)


def sharded_by_verl(folder, tensors):
    def state_dict(rank):
        mesh = init_device_mesh("cpu", (2,))
        return {name: cut(tensor, mesh, [(0, 0)]) if tensor.dim() else tensor for name, tensor in tensors.items()}

    return put_ranks(folder, state_dict, 2)


def as_torch_file(file, tensors):
    torch.save({"model": dict(tensors), "step": 3}, file)
    return Path(file)


LAYOUTS = {
    "dcp": lambda tensors: save(Path("dcp/step-1"), {"model": dict(tensors)}),
    "dcp-of-columns": lambda tensors: put_together(Path("columns"), tensors, halves_of_columns, num_files=2),
    "verl": lambda tensors: sharded_by_verl(Path("verl"), tensors),
    "torch": lambda tensors: as_torch_file("state.pt", tensors),
    "folder": lambda tensors: one_file("folder", tensors),
    "file": lambda tensors: one_file("alone", tensors) / FILE,
}


def halves_of_columns(tensor):
    if tensor.dim() < 2:
        return [tuple(map(slice, tensor.shape))]
    rows, half = slice(tensor.shape[0]), tensor.shape[1] // 2
    return [(rows, slice(half)), (rows, slice(half, tensor.shape[1]))]


def test_every_layout_equals_every_other_one():
    paths = {name: make(TENSORS) for name, make in LAYOUTS.items()}
    changed = {**TENSORS, "weight": WEIGHT.clone()}
    changed["weight"][6, 4] += 0.5
    other = one_file("changed", changed)
    for first in paths.values():
        for second in paths.values():
            comparison = compare_checkpoints(first, second)
            assert (comparison.is_equal, comparison.num_tensors, comparison.num_bytes) == (True, 3, 200)
        for comparison in (compare_checkpoints(first, other), compare_checkpoints(other, first)):
            (difference,) = comparison.differences
            assert (difference.name, difference.index, difference.num_differing) == ("weight", (6, 4), 1)
            assert comparison.num_differing == 1
            assert comparison.largest == 0.5


def test_what_is_equal_is_said_and_the_command_ends_well():
    first, second = LAYOUTS["dcp"](TENSORS), LAYOUTS["folder"](TENSORS)
    result = call("--compare", first, second)
    *found, last = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in found] == ["found dcp/step-1", "found folder"]
    assert last == "compared 3 tensors, 200 B: all equal"
    assert result.stderr == ""
    assert call("--compare", first, second, "-q").output == ""
    told = json.loads(call("--compare", first, second, "--json").stdout)
    assert [each["source"] for each in told["checkpoints"]] == [str(first), str(second)]
    assert told["compared"].pop("seconds") > 0
    assert told["compared"] == {
        "equal": True,
        "tensors": 3,
        "bytes": 200,
        "error": None,
        "tied": 0,
        "largest": 0.0,
        "num_differing": 0,
        "differences": [],
    }


def test_all_that_differs_is_told_and_the_exit_code_is_3():
    first = one_file("a", {**TENSORS, "turned": WEIGHT, "gone": torch.ones(2)})
    changed = {**TENSORS, "turned": WEIGHT.t(), "more": torch.ones(3).half(), "weight": WEIGHT.clone()}
    changed["weight"][2, 1] = -1
    changed["weight"][7, 4] = 100
    second = one_file("b", changed)
    result = call("--compare", first, second, code=3)
    values = f"2 of 40 values differ for 'weight' in b/{FILE}: expected {WEIGHT[2, 1].item()} at [2, 1], found -1.0, "
    apart = 100 - WEIGHT[7, 4].item()
    values += f"at most {apart:.6g} apart"
    assert result.stdout.splitlines()[2:] == [
        "no tensor for 'gone' in b: expected [2] float32",
        f"another shape for 'turned' in b/{FILE}: expected [8, 5] float32, found [5, 8] float32",
        values,
        f"an unexpected tensor for 'more' in b/{FILE}: found [3] float16",
    ]
    assert result.stderr == (
        "fsdp-export: two checkpoints differ: b is not a: expected 5 equal tensors, found 4 that differ: "
        f"gone, turned, weight, more; values at most {apart:.6g} apart\n"
    )
    told = json.loads(call("--compare", first, second, "--json", "-q", code=3).stdout)["compared"]
    assert (told["equal"], told["num_differing"], told["largest"]) == (False, 4, pytest.approx(apart))
    assert [(each["kind"], each["name"]) for each in told["differences"]] == [
        ("missing", "gone"),
        ("shape", "turned"),
        ("values", "weight"),
        ("unexpected", "more"),
    ]
    kept = ("--exclude", "turned", "--include", "weight", "--include", "bias", "--include", "turned")
    assert "found 1 that differ: weight;" in refusal("--compare", first, second, *kept, code=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32], ids=str)
def test_differences_are_those_that_torch_finds(dtype):
    draw = torch.Generator().manual_seed(0)
    expected = {f"t{index:02}": (torch.randn(9, 7, generator=draw) * 50).to(dtype) for index in range(30)}
    changed = {name: tensor.clone() for name, tensor in expected.items()}
    for name in list(changed)[::3]:
        places = torch.randperm(63, generator=draw)[:5]
        changed[name].view(-1)[places] += torch.arange(1, 6).to(dtype)
    first, second = one_file("a", expected), one_file("b", changed)
    comparison = compare_checkpoints(first, second)
    ours, theirs = load_file(first / FILE), load_file(second / FILE)
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert comparison.num_differing == len(differing) == 10
    assert [difference.name for difference in comparison.differences] == sorted(differing)
    for difference in comparison.differences:
        one, other = ours[difference.name], theirs[difference.name]
        places = (one != other).nonzero().tolist()
        assert (difference.index, difference.num_differing) == (tuple(places[0]), len(places))
        assert (difference.expected, difference.found) == tuple(
            str(each[difference.index].item()) for each in (one, other)
        )
        assert difference.largest == (one.double() - other.double()).abs().max().item()
    assert comparison.largest == max(difference.largest for difference in comparison.differences)


def test_only_the_first_differences_are_told_and_all_are_counted():
    expected = {f"t{index:03}": torch.zeros(3) for index in range(50)}
    one_file("a", expected)
    one_file("b", {name: tensor + index for index, (name, tensor) in enumerate(expected.items())})
    comparison = compare_checkpoints("a", "b")
    assert (comparison.num_differing, len(comparison.differences), comparison.largest) == (49, 20, 49)
    assert comparison.lines()[-1] == str(comparison).splitlines()[-1] == "and 29 more"
    assert "found 49 that differ: t001, t002, t003, t004, t005 and 44 more; values at most 49 apart" in str(
        comparison.error()
    )


def test_values_of_another_dtype_are_compared_too():
    tensors = {"even": torch.arange(8.0), "third": WEIGHT, "count": torch.tensor([2**31 - 1, -5]), "nan": torch.ones(2)}
    tensors["nan"][1] = math.nan
    first = one_file("a", tensors)
    narrow = {
        name: tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int32)
        for name, tensor in tensors.items()
    }
    second = one_file("b", narrow)
    comparison = compare_checkpoints(first, second)
    assert comparison.num_differing == 4
    told = [(difference.kind, difference.name) for difference in comparison.differences]
    assert told == [("dtype", "count"), ("dtype", "even"), ("dtype", "nan"), ("dtype", "third"), ("values", "third")]
    *_, values = comparison.differences
    apart = (WEIGHT.double() - WEIGHT.bfloat16().double()).abs()
    assert (values.num_differing, values.largest) == (int((apart > 0).sum()), apart.max().item())
    assert values.index == tuple((apart > 0).nonzero()[0].tolist())
    assert (values.expected, values.found) == tuple(
        str(each["third"][values.index].item()) for each in (tensors, narrow)
    )
    assert str(comparison.error()).endswith(
        "Give the dtype that one was cast to (--dtype, dtype=) to compare them after that cast."
    )
    # After the cast that made it, in either order.
    for paths in ((first, second), (second, first)):
        left = compare_checkpoints(*paths, dtype="bfloat16")
        assert [(difference.kind, difference.name) for difference in left.differences] == [("dtype", "count")]
        assert compare_checkpoints(*paths, dtype="bfloat16", exclude="count").is_equal
        assert [each.name for each in compare_checkpoints(*paths, dtype="bf16", keep_dtype="even").differences] == [
            "count",
            "even",
        ]


def test_integers_that_no_float_holds_differ():
    one_file("a", {"count": torch.tensor([2**60, 2**60 + 1])})
    one_file("b", {"count": torch.tensor([2**60, 2**60], dtype=torch.int64)})
    (difference,) = compare_checkpoints("a", "b").differences
    assert (difference.index, difference.expected, difference.found) == ((1,), str(2**60 + 1), str(2**60))
    save_file({"count": torch.tensor([2, 3], dtype=torch.uint8)}, Path("a", FILE))
    save_file({"count": torch.tensor([2, -3])}, Path("b", FILE))
    kind, values = compare_checkpoints("a", "b").differences
    assert (kind.kind, values.index, values.largest) == ("dtype", (1,), 6)


def test_a_nan_equals_itself_and_no_other_one():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0, -(2**31)], dtype=torch.int32)
    one_file("a", {"w": bits.view(torch.float32)})
    one_file("b", {"w": bits.view(torch.float32)})
    assert compare_checkpoints("a", "b").is_equal
    one_file("b", {"w": bits[[0, 0, 2, 3]].view(torch.float32)})
    (difference,) = compare_checkpoints("a", "b").differences
    assert (difference.index, difference.num_differing, difference.largest) == ((1,), 1, math.inf)
    assert compare_checkpoints("a", "b").as_json()["largest"] is None
    one_file("b", {"w": bits[[0, 1, 3, 3]].view(torch.float32)})
    (difference,) = compare_checkpoints("a", "b").differences
    assert (difference.expected, difference.found, difference.largest) == ("0.0", "-0.0", 0.0)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model whose experts are fused in its modules and single on the hub, as both have it."""
    folder, model = tmp_path_factory.mktemp("experts"), trained(hub_model("qwen3-moe"))
    save(folder / "run/step-3", {"model": model.state_dict()})
    model.save_pretrained(folder / "hub")
    return folder


def test_a_checkpoint_of_fused_experts_equals_its_folder(experts):
    run, hub = experts / "run", experts / "hub"
    first, second = open_two(run, hub)
    assert any(
        note.endswith("has no config; that of " + str(hub / "config.json") + " is taken") for note in first.notes
    )
    assert second.notes == []
    stored = {name for path in hub.glob("*.safetensors") for name in load_file(path)}
    assert len(stored) > len(first.source.specs)
    for one, other in ((first, second), (second, first)):
        comparison = one.compare(other)
        assert (comparison.is_equal, comparison.num_tensors) == (True, len(stored))
    shutil.copytree(hub, "changed")
    tensors, name = load_file(f"changed/{FILE}"), "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][3, 1] += 0.25
    save_file(tensors, f"changed/{FILE}")
    for paths in ((run, "changed"), ("changed", run), (experts / "run", Path("changed", FILE))):
        (difference,) = compare_checkpoints(*paths, base_model=hub).differences
        assert (difference.name, difference.index, difference.largest) == (name, (3, 1), pytest.approx(0.25))
    export_checkpoint(run, "out", base_model=hub, max_shard_size="10KB", fsync=False)
    assert call("--compare", run, "out").stdout.splitlines()[-1].endswith(": all equal")
    # Of both, what the experts of one are made of lies in one file, and of the other in several.
    assert compare_checkpoints("out", run).is_equal


def test_a_fused_tensor_is_not_read_more_often_than_its_rows(experts, environ):
    read = []
    real = DcpSource.rows

    def rows(self, spec, first, stop):
        tensor = real(self, spec, first, stop)
        read.append(tensor.nbytes)
        return tensor

    environ.setattr(DcpSource, "rows", rows)
    environ.setattr("fsdp_export.walk._MAX_THREADS", 1)
    _, run = open_two(experts / "hub", experts / "run")
    comparison = open_two(experts / "hub", experts / "run")[0].compare(run)
    assert comparison.is_equal
    experts_bytes = sum(spec.num_bytes for spec in run.source.specs if ".experts." in spec.name)
    # An expert's rows of a fused gate and up are read once for each of the two.
    assert comparison.num_bytes <= sum(read) <= comparison.num_bytes + experts_bytes
    assert max(read) <= max(spec.num_bytes for spec in run.source.specs if ".experts." not in spec.name)


def test_a_config_that_does_not_fit_leaves_names_as_they_are(experts):
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    one_file("part", {name: torch.zeros(3, 3), "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 24, 16)})
    first, second = open_two("part", experts / "hub")
    assert first.notes[-1].startswith(f"{experts / 'hub/config.json'} does not fit part, where names stay: ")
    kinds = {(each.kind, each.name) for each in first.compare(second).differences}
    assert kinds >= {("shape", name), ("missing", "model.layers.0.mlp.experts.gate_up_proj")}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A tied model: both names in DCP, one in its folder. `save_model` of safetensors keeps the other one."""
    folder, model = tmp_path_factory.mktemp("tied"), hf_model("qwen2-tied")
    save(folder / "run/step-1", {"model": model.state_dict()})
    model.save_pretrained(folder / "hub")
    return folder


def test_tied_names_are_one_tensor(tied):
    tensors = load_file(tied / "hub" / FILE)
    assert HEAD not in tensors
    both = one_file("both", {**tensors, HEAD: tensors[EMBEDDINGS]})
    head = {HEAD if name == EMBEDDINGS else name: tensor for name, tensor in tensors.items()}
    others = {"run": tied / "run", "both": both, "head": one_file("head", head)}
    for other in others.values():
        for paths in ((tied / "hub", other), (other, tied / "hub")):
            comparison = compare_checkpoints(*paths)
            assert (comparison.is_equal, comparison.num_tied) == (True, 1)
            assert comparison.lines()[0].endswith("all equal, and 1 tied name")
    # One that is not what it should be is told by the name that only one of the two has.
    one_file("both", {**tensors, HEAD: tensors[EMBEDDINGS] + 1})
    for paths in ((tied / "hub", both), (both, tied / "hub")):
        comparison = compare_checkpoints(*paths)
        (difference,) = comparison.differences
        assert (difference.name, comparison.num_differing) == (HEAD, 1)


def test_bytes_that_a_state_dict_has_once_are_one_tensor():
    """Without any config: `torch.save` keeps ties, and `save_model` of safetensors writes one name."""
    weight = torch.randn(4, 4)
    square = {"embed": weight, "head": weight, "turned": weight.t(), "own": weight.clone()}
    state = as_torch_file("state.pt", square)
    one_file("one", {"embed": weight, "turned": weight.t(), "own": weight})
    for paths in ((state, "one"), ("one", state)):
        comparison = compare_checkpoints(*paths)
        assert (comparison.is_equal, comparison.num_tied) == (True, 1)
    # Equal values are no tie, nor is the same memory seen otherwise.
    for lacking in ("own", "turned"):
        one_file("one", {name: tensor for name, tensor in square.items() if name not in {lacking, "head"}})
        (difference,) = compare_checkpoints(state, "one").differences
        assert (difference.kind, difference.name) == ("missing", lacking)


def infos(*names):
    return [TensorInfo(name, (2,), torch.float32) for name in names]


def test_of_tied_names_each_is_compared_once():
    pairs = pair(infos("a", "b", "x"), infos("a", "c", "d", "y"), [("b", "a"), ("d", "c"), ("c", "a")])
    told = {name: [(label, spec.name) for label, spec in others] for name, others in pairs.others.items()}
    assert told == {"a": [("a", "a"), ("c", "c"), ("d", "d")], "b": [("b", "a")]}
    assert [[info.name for info in infos] for infos in (pairs.missing, pairs.unexpected)] == [["x"], ["y"]]
    pairs = pair(infos("a"), infos("b"), [("b", "a")])
    assert [(label, spec.name) for label, spec in pairs.others["a"]] == [("a", "b")]
    assert not pairs.unexpected


def test_never_more_than_a_chunk_is_read(environ):
    """Of both sides, whatever the size of a tensor, and nothing twice."""
    environ.setattr("fsdp_export.walk._READ_BYTES", 4096)
    environ.setattr("fsdp_export.sinks.compare._CHUNK_BYTES", 1024)
    tensors = {"weight": torch.arange(100_000.0).view(1000, 100)}
    put_together(Path("run"), tensors)
    one_file("folder", tensors)
    sizes = {DcpSource: [], HfFolderSource: []}
    for reader, read in sizes.items():

        def rows(self, spec, first, stop, real=reader.rows, read=read):
            tensor = real(self, spec, first, stop)
            read.append(tensor.nbytes)
            return tensor

        environ.setattr(reader, "rows", rows)
    assert compare_checkpoints("run", "folder").is_equal
    assert [sum(read) for read in sizes.values()] == [400_000, 400_000]
    assert [max(read) for read in sizes.values()] == [4000, 800]


def _compare_on_two_ranks(first, second):
    one, other = open_two(first, second, ranks=(0, 1), rank=dist.get_rank())
    compared = []
    comparison = one.compare(other, delivered=compared.append)
    return sum(compared), comparison


def _without_time(comparison):
    return {key: value for key, value in comparison.as_json().items() if key != "seconds"}


def test_two_ranks_share_the_comparison_and_return_the_same():
    tensors = {f"t{number:02}": torch.randn(64, 8) for number in range(30)}
    state = as_torch_file("state.pt", {**tensors, "t30": tensors["t04"]})
    changed = {name: tensor.clone() for name, tensor in tensors.items() if name != "t07"}
    one_file("b", changed)
    changed["t00"][63, 7] += 1
    changed["t29"][0, 0] += 2
    one_file("c", {**changed, "t30": changed["t04"] - 3, "x": torch.ones(1), "t05": changed["t05"].double()})
    for path in ("b", "c"):
        shares, (one, other) = zip(*run_ranks(_compare_on_two_ranks, 2, state, path), strict=True)
        assert sum(shares) == one.num_bytes == 31 * 64 * 8 * 4
        assert min(shares) > one.num_bytes / 3
        assert _without_time(one) == _without_time(other) == _without_time(compare_checkpoints(state, path))
    told = [(each.kind, each.name, each.largest) for each in one.differences]
    assert told == [
        ("values", "t00", pytest.approx(1)),
        ("dtype", "t05", 0),
        ("missing", "t07", 0),
        ("values", "t29", pytest.approx(2)),
        ("values", "t30", pytest.approx(3)),
        ("unexpected", "x", 0),
    ]
    assert (one.num_differing, one.largest) == (6, pytest.approx(3))


def test_what_ends_early_while_it_is_read_is_an_error_and_no_difference(environ):
    tensors = {"a": torch.ones(40), "b": torch.ones(4, 10)}
    one_file("a", tensors)
    for first, second in (("a", "run"), ("run", "a")):
        shutil.rmtree("run", ignore_errors=True)
        run = put_together(Path("run"), tensors)
        one, other = open_two(first, second)
        (data,) = run.glob("*.distcp")
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(SourceError, match="truncated"):
            one.compare(other)


def truncated():
    file = one_file("bad", TENSORS) / FILE
    os.truncate(file, file.stat().st_size - 8)
    return "bad"


def empty():
    Path("bad").mkdir()
    return "bad"


def text():
    Path("bad").mkdir()
    Path("bad/notes.txt").write_text("no checkpoint")
    return "bad"


def garbage():
    Path("bad.pt").write_bytes(bytes(range(256)) * 8)
    return "bad.pt"


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def code():
    torch.save({"weight": WEIGHT, "evil": _Evil()}, "bad.pt")
    return "bad.pt"


def lost_shard():
    put_together(Path("bad"), TENSORS, num_files=2)
    Path("bad/__1_0.distcp").unlink()
    return "bad"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (truncated, SourceError, f"a truncated safetensors file in bad/{FILE}: "),
        (lost_shard, SourceError, "bad"),
        (garbage, SourceError, "bad.pt"),
        (code, UnsafeInputError, "bad.pt"),
        (empty, NotFoundError, "no sharded checkpoint in bad: "),
        (text, NotFoundError, "no sharded checkpoint in bad: "),
        (lambda: "nowhere", NotFoundError, "nowhere does not exist"),
    ],
    ids=["truncated", "lost-shard", "garbage", "code", "empty", "text", "nowhere"],
)
def test_what_is_no_checkpoint_is_refused_on_either_side(make, error, message):
    good, bad = one_file("good", TENSORS), make()
    for paths in ((good, bad), (bad, good)):
        with pytest.raises(error) as caught:
            compare_checkpoints(*paths)
        assert message in str(caught.value)
        assert refusal("--compare", *paths, code=error.exit_code) == str(caught.value).splitlines()[-1]
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "out"), "--out has no effect with --compare. Leave one of them out."),
        (("more",), "SOURCE has no effect with --compare. Leave one of them out."),
        (("--verify",), "--verify has no effect with --compare. Leave one of them out."),
        (("--dry-run",), "--dry-run has no effect with --compare. Leave one of them out."),
        (("--format", "hf"), "--format has no effect with --compare. Leave one of them out."),
        (("--keep-dtype", "bias"), "--keep-dtype has no effect with --compare that casts nothing. Leave one of them"),
        (("--include", "nothing"), "the pattern 'nothing' matches none of 3 tensors. Give whole segments of a name "),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_without_effect_are_refused(arguments, message):
    one_file("a", TENSORS)
    assert refusal("--compare", "a", "a", *arguments, code=2).startswith(message)
    assert "requires 2 arguments" in call("--compare", "a", code=2).stderr


def test_it_casts_nothing_by_itself(tied):
    """Unlike an export: a config that says bfloat16 would hide how two checkpoints in float32 differ."""
    shutil.copytree(tied / "hub", "a")
    config = json.loads(Path("a/config.json").read_text())
    Path("a/config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    shutil.copytree("a", "b")
    tensors = load_file(f"b/{FILE}")
    tensors["model.norm.weight"][0] += 1e-6
    save_file(tensors, f"b/{FILE}")
    assert "found 1 that differ: model.norm.weight;" in refusal("--compare", "a", "b", code=3)
    call("--compare", "a", "b", "--dtype", "auto")
    # What an export made of it differs until it is cast as well.
    call("a", "--out", "out", "--no-fsync")
    assert "found 26 that differ: " in refusal("--compare", "a", "out", code=3)
    call("--compare", "a", "out", "--dtype", "auto")


def test_a_folder_is_verified_without_an_export(tied):
    command = (tied / "run", "--base-model", tied / "hub", "--out", "out", "--dtype", "fp16")
    call(*command, "--no-fsync")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path("out").iterdir()}
    result = call(*command, "--verify-only")
    assert result.stdout.splitlines()[-1].startswith("verified 26 tensors, 9.41 kB: all equal, and ")
    assert not any(line.startswith("wrote") for line in result.stdout.splitlines())
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path("out").iterdir()} == before
    told = json.loads(call(*command, "--verify-only", "--json").stdout)
    assert (told["verified"]["equal"], told["verified"]["tensors"]) == (True, 26)
    Path("out/config.json").write_text("{}")
    message = refusal(*command, "--verify-only", code=3)
    assert message.startswith("what was written differs from its source in out: ")
    assert "found 1 that differ: config.json" in message
    os.truncate(f"out/{FILE}", 1000)
    assert refusal(*command, "--verify-only", code=3).startswith("what was written cannot be read back: a truncated")
    shutil.rmtree("out")
    refusal(*command, "--verify-only", code=3)
    assert not Path("out").exists()
    for option in ("--verify", "--overwrite", "--no-fsync", "--dry-run"):
        assert " has no effect with --" in refusal(*command, "--verify-only", option, code=2)
    assert refusal(tied / "run", "--verify-only", code=2).startswith("no folder to write to")


def test_what_the_library_offers(tied):
    assert fsdp_export.Comparison.__name__ == "Comparison"
    comparison = fsdp_export.compare_checkpoints(tied / "run", tied / "hub")
    assert comparison.error() is None
    assert (comparison.source, comparison.path) == (tied / "run/step-1", tied / "hub")
    assert pickle.loads(pickle.dumps(comparison)) == comparison
    with pytest.raises(UsageError, match="no such choice for LoRA"):
        compare_checkpoints(tied / "run", tied / "hub", lora="none")


def test_files_of_one_folder_are_told_by_their_names():
    for name, bias in (("one", 0.0), ("two", 1.0)):
        save_file({"bias\n": torch.tensor([bias])}, f"{name}.safetensors")
    message = refusal("--compare", "one.safetensors", "two.safetensors", code=3)
    assert message.startswith("two checkpoints differ: two.safetensors is not one.safetensors: ")
    assert r"1 that differ: 'bias\n'" in message
    comparison = compare_checkpoints("one.safetensors", "two.safetensors", exclude=[])
    assert (comparison.source, comparison.path) == (Path("one.safetensors"), Path("two.safetensors"))
