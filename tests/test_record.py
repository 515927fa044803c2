"""The record beside the weights: what it says of an export, and what a verification makes of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import adapters
import huggingface_hub
import lora_folders
import peft_models
import pytest
import torch
import torch.distributed as dist
from dcp_folders import save
from hf_folders import INDEX
from hub_folders import new_tokenizer, put_into_hub_cache, write_hub_folder
from models import hf_model, shard_on
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_export import __version__, export_checkpoint, save_checkpoint
from fsdp_export.opening import open_checkpoint
from fsdp_export.places import hub_model, recorded_place
from fsdp_export.publish import MARKER
from fsdp_export.record import RecordedFile, recorded_files
from fsdp_export.sources.survey import numbers_of

COMMIT = "0123456789" * 4
HEAD = "lm_head.weight"


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / MARKER).read_text())
    return record


def origin_of(folder: Path, name: str) -> dict[str, Any]:
    """Return what the record says of a file, without its bytes, which are compared with those of the file."""
    facts: dict[str, Any] = record_of(folder)["files"][name]
    content = (folder / name).read_bytes()
    assert facts.pop("bytes") == len(content)
    if not name.endswith(".safetensors"):
        assert facts.pop("sha256") == hashlib.sha256(content).hexdigest()
    return facts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trainer put a tokenizer above its steps."""
    folder = tmp_path_factory.mktemp("run")
    save(folder / "epoch_1_step_20/model", {"model": AutoModelForCausalLM.from_pretrained(base).state_dict()})
    new_tokenizer().save_pretrained(folder)
    return folder


def test_a_record_tells_the_source_the_choices_and_every_files_origin(run: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (base / name).rename(base / f"{name}.away")
    try:
        export_checkpoint(
            run, out, base_model=base, dtype="bf16", keep_dtype=["norm"], exclude=["*.mlp.*"], max_shard_size=4000
        )
    finally:
        for path in base.glob("*.away"):
            path.rename(path.with_suffix(""))
    record = record_of(out)
    place = f"{base.parent.name}/tiny"
    layout = record["source"].pop("layout")
    assert layout.startswith("DCP checkpoint of 1 rank, 1 data file, 21 tensors")
    assert record.pop("files").keys() == {path.name for path in out.iterdir()} - {MARKER}
    assert record == {
        "fsdp_export": __version__,
        "schema": 2,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "peft")},
        "source": {"folder": "epoch_1_step_20/model", "epoch": 1, "step": 20},
        "dtype": {"target": "bfloat16"},
        "exclude": ["*.mlp.*"],
        "keep_dtype": ["norm"],
        "base_model": {"from": "base model", "at": place},
    }
    assert origin_of(out, "config.json") == {"from": "base model", "at": place, "changed": ["torch_dtype"]}
    assert origin_of(out, "generation_config.json") == {"from": "base model", "at": place}
    assert origin_of(out, "tokenizer.json") == {"from": "parent", "at": "../.."}
    assert origin_of(out, INDEX) == {"from": "fsdp-export"}
    weights = sorted(out.glob("*.safetensors"))
    assert len(weights) > 1
    assert [origin_of(out, path.name) for path in weights] == [{"tensors": len(load_file(path))} for path in weights]


def test_a_record_names_the_hubs_model_and_its_commit_and_no_place_of_the_machine(
    run: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    put_into_hub_cache(base, tmp_path / "cache", "me/tiny", COMMIT)
    export_checkpoint(run, tmp_path / "out", base_model="me/tiny")
    expected = {"from": "base model", "at": "me/tiny", "revision": COMMIT}
    assert record_of(tmp_path / "out")["base_model"] == expected
    for name in ("config.json", "tokenizer.json"):
        assert origin_of(tmp_path / "out", name) == expected
        assert not (tmp_path / "out" / name).is_symlink()
    assert str(tmp_path) not in (tmp_path / "out" / MARKER).read_text()
    assert str(run) not in (tmp_path / "out" / MARKER).read_text()


def test_the_same_export_makes_the_same_record(run: Path, base: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        export_checkpoint(run, tmp_path / name, base_model=base)
    assert (tmp_path / "one" / MARKER).read_bytes() == (tmp_path / "other" / MARKER).read_bytes()


def test_a_live_save_records_what_it_was_made_of(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config.temperature = 0.5
    save_checkpoint(model, tmp_path / "out", tokenizer=AutoTokenizer.from_pretrained(base), include=["model.*"])
    record = record_of(tmp_path / "out")
    assert record["source"] == {"layout": "live LlamaForCausalLM, 21 tensors, whole"}
    assert (record["dtype"], record["include"]) == ({"target": "keep"}, ["model.*"])
    origin = {"from": "live object", "at": f"{base.parent.name}/tiny"}
    assert origin_of(tmp_path / "out", "config.json") == origin
    assert origin_of(tmp_path / "out", "tokenizer.json") == origin
    assert origin_of(tmp_path / "out", "generation_config.json") == {**origin, "changed": ["temperature"]}
    save_checkpoint(hf_model("qwen2-tied"), tmp_path / "tied", tokenizer=new_tokenizer())
    assert record_of(tmp_path / "tied")["tied"] == {HEAD: "model.embed_tokens.weight"}
    made = {"from": "live object", "made_of": "the live config"}
    assert origin_of(tmp_path / "tied", "config.json") == made
    made = {"from": "live object", "made_of": "the tokenizer that was given"}
    assert origin_of(tmp_path / "tied", "tokenizer.json") == made


def test_a_record_names_what_converted(tmp_path: Path) -> None:
    save_checkpoint(peft_models.qwen3_moe(), tmp_path / "moe")
    assert record_of(tmp_path / "moe")["conversion"] == "transformers' Qwen3MoeForCausalLM"
    model = adapters.Model()
    save(tmp_path / "run/step-1", {name: tensor.clone() for name, tensor in model.state_dict().items()})
    by_object: dict[str, Any] = {"adapter": adapters.OneByOne()}
    save_checkpoint(model, tmp_path / "live", **by_object)
    export_checkpoint(tmp_path / "run", tmp_path / "stored", **by_object)
    export_checkpoint(tmp_path / "run", tmp_path / "named", adapter="adapters:OneByOne()")
    for name in ("live", "stored"):
        assert record_of(tmp_path / name)["conversion"] == "adapter adapters:OneByOne"
    assert record_of(tmp_path / "named")["conversion"] == "adapter adapters:OneByOne"
    export_checkpoint(tmp_path / "run", tmp_path / "plain")
    assert "conversion" not in record_of(tmp_path / "plain")


def test_ranks_record_what_one_process_does(base: Path, tmp_path: Path) -> None:
    def save_live() -> None:
        model = shard_on(AutoModelForCausalLM.from_pretrained(base), init_device_mesh("cpu", (2,)))
        save_checkpoint(model, tmp_path / "two")

    run_ranks(save_live, 2)
    save_checkpoint(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one")
    one, two = (record_of(tmp_path / name) for name in ("one", "two"))
    assert one.pop("source") != two.pop("source")
    assert one == two


def test_adapters_are_recorded_and_verified_too(tmp_path: Path) -> None:
    model = lora_folders.peft_model("plain")
    (tmp_path / "checkpoint-3").mkdir()
    torch.save(lora_folders.on_disk(model), tmp_path / "checkpoint-3/pytorch_model_fsdp.bin")
    lora_folders.record(tmp_path / "checkpoint-3", model)
    out = tmp_path / "out"
    report = export_checkpoint(tmp_path, out, base_model=write_hub_folder(tmp_path / "base"), verify=True)
    assert report.verification is not None
    assert report.verification.lines()[-1].endswith("all equal, and 4 other files as written")
    record = record_of(out)
    assert (record["lora"], record["source"]["step"]) == ("adapter", 3)
    assert record["base_model"] == {"from": "base model", "at": f"{tmp_path.name}/base"}
    made = {"from": "source", "made_of": "the tensors and lora_train_meta.json"}
    assert origin_of(out, "adapter_config.json") == made
    assert origin_of(out, "adapter_model.safetensors") == {"tensors": 8}
    append("adapter_config.json")(out)
    (difference,) = open_checkpoint(tmp_path, base_model=tmp_path / "base").verify(out).differences
    assert (difference.kind, difference.name) == ("size", "adapter_config.json")
    for lora in ("adapter", "keep"):
        save_checkpoint(model, tmp_path / lora, lora=lora)
        assert record_of(tmp_path / lora)["lora"] == lora
    live = {"from": "live object", "made_of": "the live config"}
    assert origin_of(tmp_path / "adapter", "adapter_config.json") == live


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/data/run/step-5", {"step": 5}),
        ("/data/global_step_7/actor", {"step": 7}),
        ("/data/run/epoch=3-step=100.ckpt", {"epoch": 3, "step": 100}),
        ("/data/checkpoint-9/pytorch_model_fsdp_0", {"step": 9}),
        ("/data/step_3/policy/weights", {"step": 3}),
        ("/data/run/500", {"step": 500}),
        ("/data/2024/run/final", {}),
        ("/", {}),
    ],
)
def test_a_folder_tells_its_step(folder: str, expected: dict[str, int]) -> None:
    assert numbers_of(Path(folder)) == expected


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/data/run/step-5", "run/step-5"),
        ("/home/ann/step-5", "step-5"),
        ("/home/ann/run/step-5", "run/step-5"),
        ("/Users/ann/step-5", "step-5"),
        ("/run", "/run"),
    ],
)
def test_a_place_is_named_without_its_owner(folder: str, expected: str) -> None:
    assert recorded_place(Path(folder)) == expected


def test_only_a_snapshot_of_the_hubs_cache_is_one() -> None:
    assert hub_model(Path("/cache/models--gpt2/snapshots/abc")) == ("gpt2", "abc")
    assert hub_model(Path("/cache/models--a--b/blobs/abc")) is None
    assert hub_model(Path("/cache/a/snapshots/abc")) is None
    assert hub_model(Path("/")) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('{"files": {"a": 3, "b/c": 0}}', {"a": (3, None), "b/c": (0, None)}, id="schema 1"),
        pytest.param('{"files": ["a"]}', {"a": (None, None)}, id="names alone"),
        pytest.param('{"files": {"a": {"bytes": 3, "sha256": "ff", "more": 1}}}', {"a": (3, "ff")}, id="schema 2"),
        pytest.param('{"files": {"a": {"bytes": "3", "sha256": []}}}', {"a": (None, None)}, id="nonsense"),
        pytest.param('{"files": {"a": null}}', {"a": (None, None)}, id="nothing"),
        pytest.param('{"files": {"../a": 3, "/etc/passwd": 3, ".fsdp-export-writing/x": 1}}', {}, id="outside"),
        pytest.param('{"files": 3}', None, id="no files"),
        pytest.param("[]", None, id="no object"),
        pytest.param("{", None, id="no JSON"),
        pytest.param('{"files": ' + "[" * 100_000, None, id="deep"),
    ],
)
def test_records_of_any_age_and_content_are_read(text: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(text)
    found = recorded_files(tmp_path)
    assert found == (expected and {name: RecordedFile(*facts) for name, facts in expected.items()})


def test_no_record_is_none(tmp_path: Path) -> None:
    assert recorded_files(tmp_path) is None


def append(name: str) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        with (out / name).open("a") as file:
            file.write("\n")

    return spoil


def exchange(name: str) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[:-2] + b" " + data[-1:])

    return spoil


def say_nothing_of_torch(out: Path) -> None:
    path = out / "model.safetensors"
    save_file(load_file(path), path)


def put_other_weights_beside(out: Path) -> None:
    save_file({"a": torch.ones(1)}, out / "model-00001-of-00001.safetensors", {"format": "pt"})


def use_schema_1(out: Path) -> None:
    record = record_of(out)
    files = {name: facts["bytes"] for name, facts in record["files"].items()}
    (out / MARKER).write_text(json.dumps({"fsdp_export": "0.1.0", "files": files}))
    append("tokenizer.json")(out)


@pytest.mark.parametrize(
    ("spoil", "kind", "name", "line"),
    [
        pytest.param(
            append("config.json"),
            "size",
            "config.json",
            r"a file of another size than was written in {out}/config.json: expected 560 bytes, found 561 bytes",
            id="longer",
        ),
        pytest.param(
            exchange("tokenizer_config.json"),
            "content",
            "tokenizer_config.json",
            "a file that is not what was written in {out}/tokenizer_config.json: expected sha256 ",
            id="changed",
        ),
        pytest.param(
            lambda out: (out / "generation_config.json").unlink(),
            "gone",
            "generation_config.json",
            "a file of the export that is gone in {out}/generation_config.json: "
            "expected a file, as fsdp_export.json has it",
            id="gone",
        ),
        pytest.param(
            lambda out: (out / MARKER).write_text("{}"),
            "content",
            MARKER,
            "a file that is not what was written in {out}/fsdp_export.json: expected a record of an export",
            id="no record",
        ),
        pytest.param(
            say_nothing_of_torch,
            "metadata",
            "model.safetensors",
            "a file whose __metadata__ is not that of torch's tensors in {out}/model.safetensors: "
            "expected {{'format': 'pt'}}, found none",
            id="metadata",
        ),
        pytest.param(
            put_other_weights_beside,
            "unrecorded",
            "model-00001-of-00001.safetensors",
            "weights that the export did not write in {out}/model-00001-of-00001.safetensors",
            id="other weights",
        ),
        pytest.param(
            use_schema_1, "size", "tokenizer.json", "a file of another size than was written in ", id="schema 1"
        ),
    ],
)
def test_what_is_not_as_it_was_written_is_told(
    spoil: Callable[[Path], None], kind: str, name: str, line: str, run: Path, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_checkpoint(run, out, base_model=base)
    opened = open_checkpoint(run, base_model=base)
    verification = opened.verify(out)
    assert verification.lines() == ["verified 21 tensors, 18.8 kB: all equal, and 5 other files as written"]
    spoil(out)
    verification = opened.verify(out)
    differences = [each for each in verification.differences if each.kind != "size" or kind == "size"]
    assert [(each.kind, each.name) for each in differences] == [(kind, name)]
    assert str(differences[0]).startswith(line.format(out=out))
    error = verification.error()
    assert error is not None
    assert name in str(error)
    assert error.exit_code == 3


def test_a_file_that_is_a_pipe_is_not_waited_for(run: Path, base: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "out", base_model=base)
    (tmp_path / "out/config.json").unlink()
    os.mkfifo(tmp_path / "out/config.json")
    (difference,) = open_checkpoint(run, base_model=base).verify(tmp_path / "out").differences
    assert (difference.kind, difference.name) == ("gone", "config.json")


def test_all_ranks_learn_of_a_file_that_one_of_them_looks_at(run: Path, base: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "out", base_model=base)
    append("config.json")(tmp_path / "out")

    def verify() -> dict[str, Any]:
        return (
            open_checkpoint(run, base_model=base, ranks=(0, 1), rank=dist.get_rank()).verify(tmp_path / "out").as_json()
        )

    one, other = run_ranks(verify, 2)
    del one["seconds"], other["seconds"]
    assert one == other
    assert (one["equal"], one["files"], one["num_differing"]) == (False, 5, 1)
    assert [difference["name"] for difference in one["differences"]] == ["config.json"]
    assert "expected 21 equal tensors and 5 other files, found 1 that differ: config.json" in one["error"]


def test_a_folder_of_anybody_is_compared_without_a_record(run: Path, base: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "theirs")
    verification = open_checkpoint(run, base_model=base).verify(tmp_path / "theirs")
    assert verification.lines() == ["verified 21 tensors, 18.8 kB: all equal; no record tells of other files"]


def test_a_re_export_says_what_the_folder_loses(run: Path, base: Path, tmp_path: Path) -> None:
    save(tmp_path / "bare/step-1", AutoModelForCausalLM.from_pretrained(base).state_dict())
    out = tmp_path / "out"
    lost = "gone with the earlier export, and not replaced: config, generation config, tokenizer; "
    assert lost not in str(export_checkpoint(run, out, base_model=base).notes)
    assert lost not in str(export_checkpoint(run, out, base_model=base).notes)
    notes = export_checkpoint(tmp_path / "bare", out).notes
    assert any(note.startswith(lost) for note in notes)
    assert not (out / "config.json").exists()
    assert not any(lost in note for note in export_checkpoint(tmp_path / "bare", out).notes)
