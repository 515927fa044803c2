"""The demo, from a bare command to text: trained, exported twice, compared, loaded."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_export import demo
from fsdp_export.cli import main
from fsdp_export.errors import ComparisonError, ExportError

ROOT = Path(__file__).parents[1]
SENTENCES = [line for line in demo._TEXT.splitlines() if line]


def start(*arguments):
    """Start the command in a process group of its own, with nothing that a network or a terminal would give."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "fsdp_export", "--demo", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A demo as the README has it: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("plain") / "ckpt"
    process = start("--out", out)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return out, stdout, stderr


def test_it_says_what_it_did_and_nothing_else(plain):
    out, stdout, stderr = plain
    assert stderr == ""
    patterns = [
        r"training a tiny Qwen2 with FSDP2 and CPUOffloadPolicy on two ranks \.\.\.",
        r"trained 50 steps in \d+\.\d s, loss 5\.\d\d -> 0\.\d\d",
        rf"exported its sharded DCP checkpoint: 26 tensors, 363 kB, float32, 1 file in {out} after .* s \(.*B/s\)",
        r"exported the live model from its ranks too: all 26 tensors are equal, bit for bit",
        rf"loaded {out} with transformers, which makes of 'A shard is':",
        r"",
        rf"    {re.escape(SENTENCES[0])}",
        r"",
    ]
    lines = stdout.splitlines()
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_its_folder_loads_in_transformers_and_knows_what_it_learned(plain):
    out, _, _ = plain
    sidecars = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} >= sidecars | {"model.safetensors", "fsdp_export.json"}
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for sentence in SENTENCES:
        inputs = tokenizer(sentence[:12], return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**inputs, max_new_tokens=100, do_sample=False)
        assert tokenizer.decode(tokens[0], skip_special_tokens=True) == sentence


def test_json_stands_alone_and_a_prompt_is_continued(tmp_path):
    out = tmp_path / "ckpt"
    process = start("--out", out, "--json", "--smoke-test", "A reader finds")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    (line,) = stdout.splitlines()
    report = json.loads(line)
    assert report["smoke_test"] == SENTENCES[3].removeprefix("A reader finds")
    assert (report["tensors"], report["equal_tensors"], report["path"]) == (26, 26, str(out))
    assert report["bytes"] == sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert report["loss"][1] < 0.5 < report["loss"][0]
    assert stderr.splitlines()[-2] == f"    {SENTENCES[3]}"


def catches(pid, number):
    """Tell whether a process has a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_an_interrupt_ends_its_ranks_too(tmp_path):
    process = start("--out", tmp_path / "ckpt")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(ranks := children.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    while not catches(process.pid, signal.SIGINT):  # it does not while it starts them
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout.splitlines() == ["training a tiny Qwen2 with FSDP2 and CPUOffloadPolicy on two ranks ..."]
    assert stderr.splitlines() == ["fsdp-export: interrupted; the old export is intact, or the new one complete"]
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not (tmp_path / "ckpt").exists()


@pytest.fixture
def no_training(monkeypatch):
    """Let every rank fail, or do nothing."""

    def train_rank(rank, run, losses):
        if rank == 1:
            raise ZeroDivisionError("a rank that fails")

    monkeypatch.setattr(demo, "_train_rank", train_rank)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_rank_that_fails_is_an_error(no_training, tmp_path, capfd):
    with pytest.raises(ExportError, match=r"the training of the demo failed\. The messages of its ranks are above"):
        demo._train(tmp_path)
    assert "ZeroDivisionError: a rank that fails" in capfd.readouterr().err


def test_a_difference_is_one_with_an_exit_code_of_its_own(plain, tmp_path, monkeypatch):
    out, _, _ = plain
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    other = tmp_path / "live"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ComparisonError, match=r"different values for 'model\.norm\.weight' in ") as caught:
        demo._compare(out, other)
    assert caught.value.exit_code == 3
    del tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ComparisonError, match=r"the two exports have different tensors: found model\.norm\.weight"):
        demo._compare(out, other)


def test_weights_of_someone_else_are_not_replaced(tmp_path, monkeypatch):
    """The demo hands `--overwrite` on."""
    calls = []

    def run_demo(out, **options):
        calls.append((out, options["prompt"], options["overwrite"]))
        return {}

    monkeypatch.setattr(demo, "run_demo", run_demo)
    for arguments in ([], ["--overwrite", "--smoke-test", "x"]):
        assert CliRunner().invoke(main, ["--demo", "--out", "out", *arguments]).exit_code == 0
    assert calls == [(Path("out"), None, False), (Path("out"), "x", True)]
