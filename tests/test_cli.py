"""The command as people run it: what it prints where, what it writes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from dcp_folders import save
from hub_folders import add_old_rope, new_tokenizer, put_into_hub_cache
from models import hf_model
from safetensors.torch import load_file, save_file

from fsdp_export import cli, console, progress
from fsdp_export.cli import main
from fsdp_export.errors import RankError

ROOT = Path(__file__).parents[1]
HEAD = "lm_head.weight"
FOUND = "DCP checkpoint of 1 rank, 1 data file, 27 tensors, 20.9 kB, float32, below 'model', 2 other entries left out"
CONFIGS = {"config.json", "generation_config.json"}
# A run of the command whose first read lasts, so that there is time to interrupt it.
SLOW = """
import sys, time
from fsdp_export import cli, console
from fsdp_export.sources.dcp import DcpSource
DcpSource.rows = lambda *_: time.sleep(60)
cli.main(sys.argv[1:], prog_name="fsdp-export")
"""


@pytest.fixture(scope="module")
def model():
    return hf_model("qwen2-tied")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Two steps of a run, with optimizer and counter."""
    folder = tmp_path_factory.mktemp("run")
    for step in (40, 500):
        optimizer = {"state": {"model.norm.weight": {"exp_avg": torch.full((16,), float(step))}}}
        save(folder / f"step-{step}", {"model": model.state_dict(), "optimizer": optimizer, "step": step})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The model that was trained, in bfloat16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    hf_model("qwen2-tied").to(torch.bfloat16).save_pretrained(folder)
    add_old_rope(folder / "config.json")
    new_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def environ(environ, tmp_path):
    """Stand one folder further down."""
    (tmp_path / "here").mkdir()
    environ.chdir(tmp_path / "here")
    return environ


def call(*arguments, code=0):
    """Run the command in this process and check its exit code."""
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="fsdp-export")
    assert result.exit_code == code, (result.output, result.exception)
    assert code == 0 or isinstance(result.exception, SystemExit)
    return result


def refusal(*arguments, code=2):
    """Return what the command says on stderr when it refuses something, without its name."""
    result = call(*arguments, code=code)
    *_, message = result.stderr.splitlines()
    assert message.startswith("fsdp-export: ")
    return message.removeprefix("fsdp-export: ")


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sidecars_of(folder):
    """Return the small files of a model's folder, whichever this version of transformers writes."""
    return {name: data for name, data in tree(folder).items() if ".safetensors" not in name}


def names_from(place, lines):
    """Return which files are said to come from a place."""
    (names,) = (line.removeprefix(f"from {place}: ") for line in lines if line.startswith(f"from {place}: "))
    return set(names.split(", "))


def untied(model, dtype=None):
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name != HEAD}


def assert_holds(folder, expected):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_an_export_says_what_it_found_decided_and_wrote(run, base, model, environ):
    environ.chdir(run.parent)
    result = call(run.name, "--base-model", base.name, "--out", "here/out")
    found, origins, *lines, last = result.stdout.splitlines()
    assert found == f"found {run.name}/step-500 of 2 checkpoints below: {FOUND}"
    assert names_from(base.name, [origins]) == sidecars_of(base).keys() >= {*CONFIGS, "tokenizer.json"}
    assert lines == [
        "float32 becomes bfloat16, as the config says (--dtype keep to keep it)",
        "lm_head.weight is tied to model.embed_tokens.weight and left out",
    ]
    assert last.startswith("wrote 26 tensors, 9.41 kB, bfloat16, 1 file in here/out after 0.")
    assert last.endswith("B/s)")
    assert result.stderr == ""
    out = Path("here/out")
    assert_holds(out, untied(model, torch.bfloat16))
    assert tree(out).items() >= sidecars_of(base).items()


def test_model_is_another_name_of_base_model(run, base, tmp_path):
    call(run, "--model", base, "--out", "one")
    call(run, "--base-model", base, "--out", "other")
    assert tree(Path("one")) == tree(Path("other"))


def test_the_newest_complete_step_below_this_folder_is_taken(run, environ):
    step = save(Path("runs/step-700"), {"weight": torch.ones(3)})
    broken = save(Path("runs/step-900"), {"weight": torch.ones(3)})
    (broken / "__0_0.distcp").write_bytes(b"")
    environ.chdir("runs")
    result = call("--out", "out")
    assert result.stdout.startswith(f"found {step.name} of 2 checkpoints below: DCP checkpoint")
    warning, *more = result.stderr.splitlines()
    assert warning.startswith("fsdp-export: warning: an incomplete checkpoint is skipped: truncated data files in ")
    assert more == []
    assert_holds(Path("out"), {"weight": torch.ones(3)})


def test_the_folder_of_a_checkpoint_may_be_stood_in(run, environ, tmp_path):
    environ.chdir(run / "step-40")
    assert call("--out", tmp_path / "out").stdout.startswith(f"found {run}/step-40: DCP checkpoint")


def test_nothing_found_says_what_was_looked_for_and_offers_the_demo(tmp_path):
    Path("notes.txt").touch()
    assert refusal("--out", "out") == (
        f"no sharded checkpoint in {tmp_path}/here: expected DCP, rank files or shards of safetensors there or up to 4 "
        "levels below, found notes.txt. Name the folder of a checkpoint, or make one to try with: "
        "fsdp-export --demo --out ckpt/."
    )
    assert refusal("nowhere", "--out", "out").startswith("nowhere does not exist. Name the folder of a checkpoint, ")
    assert not Path("out").exists()


def test_json_stands_alone_on_stdout(run, base):
    call(run, "--base-model", base, "--out", "out")
    arguments = (run, "--base-model", base, "--out", "out", "--max-shard-size", "2KB", "--include", "layers")
    result = call(*arguments, "--json")
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert report["source"] == f"{run}/step-500"
    assert report["found"] == FOUND
    assert report["path"] == "out"
    assert report["tensors"] == 24
    assert report["bytes"] == sum(tensor.nbytes for tensor in load_all(Path("out")).values())
    assert report["seconds"] > 0
    assert report["removed"] == ["model.safetensors"]
    assert "include layers: 24 of 26 tensors" in report["notes"]
    written = tree(Path("out"))
    assert report["files"] == {name: len(data) for name, data in written.items() if name != "fsdp_export.json"}
    said = result.stderr.splitlines()
    assert said[0].startswith(f"found {run}/step-500")
    assert said[-1].startswith("wrote 24 tensors")


def load_all(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_json_of_a_dry_run(run, base, model):
    arguments = (run, "--base-model", base, "--dry-run", "--json", "--dtype", "keep", "--max-shard-size", "2KB")
    result = call(*arguments)
    (line,) = result.stdout.splitlines()
    plan = json.loads(line)
    assert plan.keys() == {"source", "found", "notes", "files", "tensors"}
    assert {tensor["name"]: (tensor["shape"], tensor["bytes"]) for tensor in plan["tensors"]} == {
        name: (list(tensor.shape), tensor.nbytes) for name, tensor in untied(model).items()
    }
    assert {tensor["dtype"] for tensor in plan["tensors"]} == {"float32"}
    assert {tensor["file"] for tensor in plan["tensors"]} == plan["files"].keys()
    call(run, "--base-model", base, "--out", "out", "--dtype", "keep", "--max-shard-size", "2KB")
    assert {path.name: path.stat().st_size for path in Path("out").glob("*.safetensors")} == plan["files"]
    assert "26 tensors, 18.8 kB, float32, 11 files" in result.stderr
    quiet = call(*arguments, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_only_json_goes_to_stdout_whoever_prints(run, capfd, environ):
    """Libraries, also those written in C++, and processes that are started know nothing of our option."""
    real = cli.joined_group

    def noisy():
        print("print")
        subprocess.run(["echo", "process"], check=True)
        os.write(1, b"C++\n")
        return real()

    environ.setattr(cli, "joined_group", noisy)
    result = call(run, "--out", "out", "--json", "-q")
    json.loads(result.stdout)
    assert result.stderr == "print\n"
    assert capfd.readouterr() == ("", "process\nC++\n")


def test_quiet_prints_nothing_but_warnings_and_errors(run, environ):
    result = call(run, "--out", "out", "-q")
    assert result.output == ""
    assert result.stderr == ""
    save(Path("latest/step-1"), {"weight": torch.ones(3)})
    Path("latest/LATEST").write_text("step-2")
    result = call("latest", "--out", "out", "-q")
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "fsdp-export: warning: the latest step of latest is said to be 'step-2', which is not there"
    ]
    assert refusal("nowhere", "--out", "out", "-q").startswith("nowhere does not exist")


def test_a_dry_run_prints_a_table_and_writes_nothing(run, base):
    result = call(
        run, "--base-model", base, "--dry-run", "--out", "out", "--include", "embed_tokens", "--include", "model.norm"
    )
    assert result.stdout.splitlines()[-6:] == [
        "include model.norm: 1 of 26 tensors",
        "lm_head.weight is tied to model.embed_tokens.weight and left out",
        "name                       shape  dtype     bytes  file",
        "model.embed_tokens.weight  33x16  bfloat16  1,056  model.safetensors",
        "model.norm.weight          16     bfloat16     32  model.safetensors",
        "2 tensors, 1.09 kB, bfloat16, 1 file",
    ]
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("keep", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("float32", torch.float32),
        ("fp32", torch.float32),
    ],
)
def test_a_dtype_that_is_asked_for_is_written_and_stands_in_the_config(given, dtype, run, base, model):
    result = call(run, "--base-model", base, "--out", "out", "--dtype", given)
    assert_holds(Path("out"), untied(model, dtype))
    config = json.loads(Path("out/config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == str(dtype).removeprefix("torch.")
    assert "as the config says" not in result.stdout


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("5GB", 5 * 10**9), ("1TB", 10**12), ("2KB", 2000), ("2000", 2000), ("0.0035 mb", 3500), ("1", 1)],
)
def test_a_shard_size_is_decimal(size, num_bytes, run, base, model):
    call(run, "--base-model", base, "--out", "out", "--dtype", "keep", "--max-shard-size", size)
    model.save_pretrained("oracle", max_shard_size=num_bytes)
    ours, theirs = tree(Path("out")), tree(Path("oracle"))
    weights = {name: data for name, data in theirs.items() if ".safetensors" in name}
    assert {name: data for name, data in ours.items() if ".safetensors" in name} == weights


@pytest.mark.parametrize("size", ["5GiB", "5 apples", "GB", "0", "0GB", "-5GB", "nanGB", "1e9", "", "5.GB", "100B"])
def test_what_is_no_shard_size_is_refused(size, run):
    result = call(run, "--out", "out", f"--max-shard-size={size}", code=2)
    assert result.stderr.splitlines()[-1] == (
        f"Error: Invalid value for '--max-shard-size': {size!r} is no size: "
        "give bytes, or a number with KB, MB, GB or TB (decimal)."
    )


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("model", "model.norm.weight"), ("model.model.", "norm.weight"), ("", "model.model.norm.weight")],
)
def test_a_prefix_is_taken_off(prefix, name, run):
    call(run, "--out", "out", "--prefix", prefix)
    assert name in load_file("out/model.safetensors")


def test_a_prefix_that_is_not_there_is_refused(run):
    assert refusal(run, "--out", "out", "--prefix", "critic") == (
        f"no tensor of a model below 'critic.' in {run}/step-500: found 'model.'. "
        "Leave --prefix out, or give one of these."
    )


def test_patterns_choose_and_their_hits_are_reported(run):
    result = call(run, "--out", "out", "--include", "*.mlp.*", "--include", HEAD, "--exclude", "down_proj")
    assert result.stdout.splitlines()[1:4] == [
        "include *.mlp.*: 6 of 27 tensors",
        "include lm_head.weight: 1 of 27 tensors",
        "exclude down_proj: 2 of 27 tensors",
    ]
    assert len(load_file("out/model.safetensors")) == 5
    assert refusal(run, "--out", "out", "--exclude", "mlq").startswith("the pattern 'mlq' matches none of 27 tensors. ")


def test_a_device(run):
    call(run, "--out", "out", "--device", "cpu")
    message = "a device that cannot be used here: found gpu. Leave it out to use the CPU."
    assert refusal(run, "--out", "out", "--device", "gpu") == message


def test_our_own_export_is_replaced_and_stale_files_are_listed(run, base, model):
    call(run, "--base-model", base, "--out", "out", "--max-shard-size", "8KB")
    Path("out/notes.txt").write_text("kept")
    result = call(run, "--out", "out", "--format", "safetensors", "--no-fsync")
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    stale = sorted({*sidecars_of(base), *shards, "model.safetensors.index.json"})
    assert result.stdout.splitlines()[1] == f"removed {', '.join(stale)} of the earlier export"
    assert tree(Path("out")).keys() == {"fsdp_export.json", "model.safetensors", "notes.txt"}
    assert_holds(Path("out"), dict(model.state_dict()))


def test_foreign_weights_are_replaced_only_when_told_so(run, model):
    Path("out").mkdir()
    save_file({"mine": torch.ones(3)}, "out/model.safetensors")
    Path("out/pytorch_model.bin").touch()
    before = tree(Path("out"))
    assert refusal(run, "--out", "out", code=1) == (
        "weights that no export recorded in out: found model.safetensors, pytorch_model.bin. "
        "Replace them with overwrite=True (--overwrite), or export into another folder."
    )
    assert tree(Path("out")) == before
    result = call(run, "--out", "out", "--overwrite")
    assert "removed pytorch_model.bin of the earlier export" in result.stdout
    assert_holds(Path("out"), dict(model.state_dict()))


@pytest.mark.parametrize("out", ["hf", "step-1/hf", "step-1"])
def test_the_result_may_lie_inside_the_source(out, base, model, environ):
    save(Path("step-1"), model.state_dict())
    before = tree(Path("step-1"))
    for _ in range(2):
        result = call("--base-model", base, "--out", out)
        assert result.stdout.startswith("found step-1: DCP checkpoint")
    assert_holds(Path(out), untied(model, torch.bfloat16))
    assert tree(Path("step-1")).items() >= before.items()


def test_a_file_is_no_folder_to_write_into(run):
    Path("out").write_text("mine")
    assert refusal(run, "--out", "out", code=1).startswith("a file stands where a folder is needed in out. ")
    assert Path("out").read_text() == "mine"


def test_the_base_model_is_not_replaced(run, base):
    before = tree(base)
    message = f"the base model would be replaced in {base}. Write into another folder."
    assert refusal(run, "--base-model", base, "--out", base, "--overwrite") == message
    assert tree(base) == before


@pytest.mark.parametrize(
    ("arguments", "option", "cause"),
    [
        ("--demo SOURCE", "SOURCE", "--demo"),
        ("--demo --dtype auto", "--dtype", "--demo"),
        ("--demo --dry-run", "--dry-run", "--demo"),
        ("--demo --no-fsync", "--no-fsync", "--demo"),
        ("--demo --verify", "--verify", "--demo"),
        ("--demo --prefix=", "--prefix", "--demo"),
        ("--demo --model x", "--base-model", "--demo"),
        ("--dry-run --no-fsync", "--no-fsync", "--dry-run"),
        ("--dry-run --fsync", "--fsync", "--dry-run"),
        ("--dry-run --overwrite", "--overwrite", "--dry-run"),
        ("--dry-run --device cpu", "--device", "--dry-run"),
        ("--dry-run --verify", "--verify", "--dry-run"),
        ("--dry-run --smoke-test x", "--smoke-test", "--dry-run"),
        ("--dry-run -q", "--quiet", "--dry-run"),
        ("--dtype keep --keep-dtype x", "--keep-dtype", "--dtype keep"),
        ("--format safetensors --max-shard-size 1GB", "--max-shard-size", "--format safetensors"),
        ("--format safetensors --smoke-test x", "--smoke-test", "--format safetensors"),
    ],
)
def test_an_option_without_effect_is_refused(arguments, option, cause):
    message = f"{option} has no effect with {cause}. Leave one of them out."
    assert refusal("--out", "out", *arguments.split()) == message


@pytest.mark.parametrize("option", ["--max-shard-size=1GB", "--smoke-test=x"])
def test_an_option_without_effect_on_this_checkpoint_is_refused(option, run):
    name = option.partition("=")[0]
    message = f"{name} has no effect with one safetensors file, which it is without a config. Leave one of them out."
    assert refusal(run, "--out", "out", option) == message
    assert not Path("out").exists()


def test_a_base_model_of_which_nothing_is_used_is_refused(run, base, model):
    arguments = ("--base-model", base, "--out", "out", "--format", "safetensors")
    save(Path("other/step-1"), {"weight": torch.ones(3)})
    assert refusal("other", *arguments, "--dtype", "fp16") == (
        "--base-model has no effect with --format safetensors, where its config decides on no dtype and no tied "
        "weight. Leave one of them out."
    )
    call("other", *arguments)
    assert_holds(Path("out"), {"weight": torch.ones(3, dtype=torch.bfloat16)})
    call(run, *arguments, "--dtype", "fp16")
    assert_holds(Path("out"), untied(model, torch.float16))
    assert tree(Path("out")).keys() == {"fsdp_export.json", "model.safetensors"}


def test_what_is_missing_is_asked_for(run):
    way_out = "Give --out DIR; or --dry-run to see what would be written, or --demo --out DIR to try it."
    assert refusal(run) == refusal("--demo") == f"no folder to write to. {way_out}"
    empty = "--smoke-test has no text to continue. Give the beginning of a sentence."
    assert refusal("--demo", "--out", "out", "--smoke-test", " ") == empty


@pytest.mark.parametrize("arguments", [["--nope"], ["one", "two"], ["--format", "gguf"], ["--dtype", "int8"]], ids=str)
def test_what_click_refuses_is_usage(arguments):
    assert "Try 'fsdp-export --help' for help." in call("--out", "out", *arguments, code=2).stderr


@pytest.mark.parametrize("is_complete", [True, False], ids=["all-cached", "no-tokenizer-cached"])
def test_a_base_model_in_the_hub_cache(is_complete, run, base, model, environ, tmp_path):
    snapshot = put_into_hub_cache(base, tmp_path / "cache", "me/tiny")
    environ.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    environ.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if not is_complete:
        for name in sidecars_of(base).keys() - CONFIGS:
            (snapshot / name).unlink()
    result = call(run, "--base-model", "me/tiny", "--out", "out")
    names = sidecars_of(base).keys() if is_complete else CONFIGS
    assert names_from(snapshot, result.stdout.splitlines()) == names
    warning = "me/tiny: only what the hub cache has was used: HF_HUB_OFFLINE is set"
    assert (warning in result.stdout.splitlines()) is not is_complete
    assert tree(Path("out")).items() >= {name: sidecars_of(base)[name] for name in names}.items()
    assert not any(path.is_symlink() for path in Path("out").iterdir())
    assert_holds(Path("out"), untied(model, torch.bfloat16))


def test_a_base_model_that_is_nowhere(run, environ, tmp_path):
    environ.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    environ.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(run, "--base-model", "me/tiny", "--out", "out")
    assert message.startswith("the base model 'me/tiny' is no folder, not in the hub cache and not to be downloaded: ")


def test_a_base_model_of_other_shapes_is_refused(run, base, tmp_path):
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 24}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    message = (
        f"a shape that disagrees with the config for 'model.layers.0.mlp.gate_proj.weight' in {run}/step-500: expected "
        f"(24, 16) as {tmp_path}/other/config.json has it, found (26, 16), and 5 more that disagree. "
        "Give a --base-model whose config fits, or leave the tensor out with --exclude."
    )
    arguments = (run, "--base-model", tmp_path / "other")
    for more in (("--out", "out"), ("--out", "out", "-q"), ("--dry-run",)):
        assert refusal(*arguments, *more, code=1) == message
    assert not Path("out").exists()


def test_a_resized_vocabulary_is_told_before_anything_is_written(run, base, tmp_path):
    config = json.loads((base / "config.json").read_text()) | {"vocab_size": 30}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    note = "vocab_size in config.json becomes 33, the number of rows of model.embed_tokens.weight; it was 30"
    arguments = (run, "--base-model", tmp_path / "other")
    assert note in call(*arguments, "--dry-run").stdout.splitlines()
    assert note in call(*arguments, "--out", "out").stdout.splitlines()
    assert json.loads(Path("out/config.json").read_text())["vocab_size"] == 33


def test_a_run_without_a_config_becomes_one_file(run, model):
    result = call(run, "--out", "out")
    assert result.stdout.splitlines()[1] == (
        f"not written: config.json: not in {run / 'step-500'} or above it; give --base-model for a Hugging Face folder "
        "in place of one safetensors file"
    )
    assert result.stdout.count("--base-model") == 1
    assert_holds(Path("out"), dict(model.state_dict()))
    assert tree(Path("out")).keys() == {"fsdp_export.json", "model.safetensors"}
    assert refusal(run, "--out", "out", "--format", "hf") == (
        "no config for a Hugging Face folder. Give --base-model, or --format safetensors."
    )


def test_progress_is_shown_on_stderr(run, environ):
    environ.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    result = call(run, "--out", "out")
    assert result.stderr.splitlines()[-1] == "writing: 20.9 kB of 20.9 kB after 0 s"
    assert call(run, "--out", "out", "-q").stderr == ""
    environ.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    assert call(run, "--out", "out").stderr == ""


def test_an_option_is_no_folder(run):
    message = refusal(run, "--out", "-q")
    assert message == "--out has no folder: found -q. For a folder of this name, give ./ before it."


def test_a_smoke_test_continues_a_text(run, base, model):
    result = call(run, "--base-model", base, "--out", "out", "--smoke-test", "aabab", "--json")
    text = json.loads(result.stdout)["smoke_test"]
    assert set(text) <= set("abc <>/unks")
    assert result.stderr.splitlines()[-1] == f"transformers loads it and continues 'aabab': {text!r}"


def test_a_smoke_test_of_what_transformers_does_not_know(run, base):
    Path("base").mkdir()
    for name, data in sidecars_of(base).items():
        Path("base", name).write_bytes(data.replace(b"qwen2", b"nobodys").replace(b"Qwen2", b"Nobodys"))
    result = call(run, "--base-model", "base", "--out", "out", "--smoke-test", "a", code=1)
    assert "wrote 27 tensors" in result.stdout
    *_, message = result.stderr.splitlines()
    assert message.startswith("fsdp-export: transformers cannot load the export in out: found ")
    assert message.endswith(". The folder is complete; only this test of it failed.")


def test_a_smoke_test_with_the_config_of_another_model(run, base):
    Path("base").mkdir()
    for name, data in sidecars_of(base).items():
        Path("base", name).write_bytes(data)
    config = json.loads(Path("base/config.json").read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    Path("base/config.json").write_text(json.dumps(config))
    message = refusal(run, "--base-model", "base", "--out", "out", "--smoke-test", "a", code=3)
    assert message == (
        "transformers reports missing tensors in out: found model.layers.2.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj.weight, "
        "model.layers.2.post_attention_layernorm.weight and 7 more. Give the right --base-model."
    )


def test_processes_that_did_not_join_are_refused(run, environ):
    environ.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for arguments in ([run], ["--demo"]):
        message = refusal(*arguments, "--out", "out")
        assert message.startswith("4 processes were started (OMPI_COMM_WORLD_SIZE) that did not join a group")


def test_the_demo_does_not_run_under_a_launcher(environ):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        environ.setenv(name, value)
    assert refusal("--demo", "--out", "out") == "--demo starts its ranks itself. Run it without a launcher."


def test_a_bug_keeps_its_traceback(run, environ):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    environ.setattr("fsdp_export.opening.open_source", fail)
    result = CliRunner().invoke(main, [str(run), "--out", "out"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_bug_on_a_rank_shows_its_traceback_there(capsys, environ):
    environ.setattr(console, "_SILENT_SECONDS", 0.0)

    def fail(cause, text, *, may_speak):
        with pytest.raises(SystemExit) as caught, console.exit_codes(lambda: may_speak):
            raise RankError(text) from cause
        assert caught.value.code == 1
        return capsys.readouterr().err.splitlines()

    bug, text = ZeroDivisionError("a bug"), "rank 1 (host): ZeroDivisionError: a bug"
    assert fail(bug, text, may_speak=False) == ["ZeroDivisionError: a bug"]
    assert fail(bug, text, may_speak=True) == ["ZeroDivisionError: a bug", f"fsdp-export: {text}"]
    assert fail(None, text, may_speak=True) == [f"fsdp-export: {text}"]
    assert fail(RuntimeError("a socket"), "the store is gone", may_speak=True) == ["fsdp-export: the store is gone"]
    assert fail(None, text, may_speak=False) == []


@pytest.mark.parametrize("arguments", [["--nope", "--out", "out"], []], ids=["click", "ours"])
def test_what_is_wrong_for_all_ranks_is_said_by_the_first(arguments, environ):
    environ.setattr(console, "_SILENT_SECONDS", 0.0)
    environ.setenv("TORCHELASTIC_RUN_ID", "none")
    environ.setenv("RANK", "1")
    assert call(*arguments, code=2).output == ""
    environ.setenv("RANK", "0")
    assert call(*arguments, code=2).stderr != ""


def subprocess_of(*command, **options):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(map(str, command)), env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options
    )


def test_an_interrupt_leaves_the_old_export(run, base, environ):
    call(run, "--base-model", base, "--out", "out")
    before = tree(Path("out"))
    process = subprocess_of(sys.executable, "-c", SLOW, run, "--out", "out", "--dtype", "fp16")
    while not Path("out/.fsdp-export-writing/model.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout.startswith("found ")
    assert stderr.splitlines() == ["fsdp-export: interrupted; the old export is intact, or the new one complete"]
    assert tree(Path("out")) == before


def torchrun(*arguments):
    """Run the command on two ranks; return exit code, stdout, and our lines on stderr."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fsdp_export")
    process = subprocess_of(sys.executable, *launcher, *arguments)
    stdout, stderr = process.communicate()
    ours = [line for line in stderr.splitlines() if line.startswith("fsdp-export: ")]
    # On a busy machine one may wait for the other.
    return process.returncode, stdout, [line for line in ours if " waits for " not in line]


def test_under_torchrun_the_result_is_the_same_and_one_rank_speaks(run, base):
    arguments = (run, "--base-model", base, "--max-shard-size", "4KB", "--verify")
    alone = call(*arguments, "--out", "alone")
    code, stdout, errors = torchrun(*arguments, "--out", "together")
    assert (code, errors) == (0, [])
    assert tree(Path("together")) == tree(Path("alone"))
    *lines, wrote, verified = stdout.splitlines()
    *expected, expected_wrote, expected_verified = alone.stdout.splitlines()
    assert (lines, verified) == (expected, expected_verified)
    assert verified == "verified 26 tensors, 9.41 kB: all equal, and 5 other files as written"
    assert wrote.partition(" in ")[0] == expected_wrote.partition(" in ")[0]


def test_under_torchrun_an_error_appears_once(run):
    Path("out").mkdir()
    save_file({"mine": torch.ones(3)}, "out/model.safetensors")
    code, stdout, errors = torchrun(run, "--out", "out")
    assert code == 1
    assert stdout.count("found ") == 1
    (error,) = errors
    assert "weights that no export recorded in out" in error
    assert tree(Path("out")).keys() == {"model.safetensors"}
