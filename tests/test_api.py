"""A source and a sink put together: what lands in the folder, and who wrote it."""

import json
import pydoc
import shutil
from itertools import product

import pytest
import torch
import torch.distributed as dist
from dcp_folders import save
from hub_folders import write_hub_folder
from models import hf_model, shard, tiny
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import fsdp_export
from fsdp_export import export_checkpoint, save_checkpoint
from fsdp_export.errors import DisagreementError, NotFoundError, SourceError, UsageError
from fsdp_export.opening import open_checkpoint

TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model():
    return hf_model("qwen2-tied")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run with a checkpoint, and beside it the config that the trainer wrote."""
    folder = tmp_path_factory.mktemp("run")
    save(folder / "step-5", {"model": model.state_dict(), "step": 5})
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(model, tmp_path_factory):
    """The model that was trained, in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    hf_model("qwen2-tied").to(torch.bfloat16).save_pretrained(folder)
    return folder


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_holds(folder, expected):
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def untied(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name != HEAD}


def test_ranks_that_find_different_ties_all_say_so(tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    sizes = {"hidden_size": 4, "vocab_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    tied = torch.randn(8, 4)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save(tmp_path / "step-1", {**dict.fromkeys(names, tied), "model.norm.weight": torch.ones(4)})

    def check() -> str:
        rank = dist.get_rank()
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr("fsdp_export.opening.meta_twin", lambda *_, **__: None)
            with pytest.raises(DisagreementError) as caught:
                open_checkpoint(tmp_path, ranks=(0, 1), rank=rank)
        return str(caught.value)

    one, other = run_ranks(check, 2)
    assert one == other
    assert one == (
        "the ranks find different tied weights: found rank 0: {'lm_head.weight': 'model.embed_tokens.weight'}; rank 1: "
        "{}. Use the same transformers and the same --base-model on every host."
    )


def test_a_checkpoint_becomes_the_folder_of_save_pretrained(run, model, tmp_path):
    report = export_checkpoint(run, tmp_path / "out")
    model.save_pretrained(tmp_path / "oracle")
    ours, theirs = tree(tmp_path / "out"), tree(tmp_path / "oracle")
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert (report.num_tensors, report.num_bytes) == (26, sum(t.nbytes for t in untied(model).values()))
    assert report.files == {name: len(data) for name, data in ours.items() if name != "fsdp_export.json"}
    assert report.notes[0] == f"{HEAD} is tied to {EMBEDDING} and left out"


@pytest.mark.parametrize("kinds", list(product([True, False], repeat=3)), ids=str)
def test_what_is_there_is_copied_and_what_is_not_is_told(kinds, tmp_path):
    hub = write_hub_folder(tmp_path / "hub")
    save(tmp_path / "run/step-5", {"model": load_file(hub / "model.safetensors")})
    files = {"config": ["config.json"], "generation_config": ["generation_config.json"], "tokenizer": TOKENIZER}
    there = [kind for kind, is_there in zip(files, kinds, strict=True) if is_there]
    for name in (name for kind in there for name in files[kind]):
        shutil.copy(hub / name, tmp_path / "run")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out")
    copied = {name for kind in there for name in files[kind]}
    assert report.files.keys() == {"model.safetensors", *copied}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in copied} == {
        name: (tmp_path / "run" / name).read_bytes() for name in copied
    }
    missing = [note for note in report.notes if note.startswith("not written: ")]
    assert [note.split(": ")[1].removesuffix(".json") for note in missing] == [
        kind for kind in files if kind not in there
    ]
    assert sum("--base-model" in note for note in report.notes) == ("config" not in there)


def test_a_folder_is_a_string_or_a_path(run, base, tmp_path):
    export_checkpoint(str(run), str(tmp_path / "one"), base_model=str(base))
    export_checkpoint(run, tmp_path / "other", base_model=base)
    assert tree(tmp_path / "one") == tree(tmp_path / "other")


def test_the_record_tells_the_step_and_nothing_of_the_machine(run, tmp_path):
    export_checkpoint(run, tmp_path / "out")
    record = json.loads((tmp_path / "out/fsdp_export.json").read_text())
    layout = record["source"].pop("layout")
    assert layout.startswith("DCP checkpoint of 1 rank, 1 data file, 27 tensors")
    assert record["source"] == {"folder": f"{run.name}/step-5", "step": 5}
    assert str(run.parent) not in json.dumps(record)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        pytest.param({"dtype": "bfloat16"}, torch.bfloat16, id="dtype"),
        pytest.param({"torch_dtype": "float16"}, torch.float16, id="torch_dtype"),
        pytest.param({"torch_dtype": "torch.float16"}, torch.float16, id="spelled-out"),
        pytest.param({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16, id="both"),
        pytest.param({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16, id="text-part"),
        pytest.param({"dtype": "float32"}, torch.float32, id="as-it-is"),
        pytest.param({"dtype": "float8_e4m3fn"}, torch.float32, id="packed"),
        pytest.param({"dtype": "auto"}, torch.float32, id="no-dtype"),
        pytest.param({"dtype": None, "text_config": "none"}, torch.float32, id="none"),
    ],
)
def test_auto_takes_the_configs_dtype_where_it_narrows(named, expected, tmp_path):
    save(tmp_path / "run/step-1", {"weight": torch.arange(4.0), "count": torch.tensor(3)})
    (tmp_path / "run/config.json").write_text(json.dumps({"model_type": "mine", **named}))
    opened = open_checkpoint(tmp_path / "run", dtype="auto")
    assert {output.name: output.dtype for output in opened.exporter.plan.outputs} == {
        "weight": expected,
        "count": torch.int64,
    }
    name = str(expected).removeprefix("torch.")
    note = f"float32 becomes {name}, as the config says (--dtype keep to keep it)"
    unknown = "transformers has no class mine that takes this config, so names stay as they are"
    assert opened.notes == ([note] if expected != torch.float32 else []) + [unknown]


def test_auto_widens_nothing(tmp_path):
    save(tmp_path / "run/step-1", {"weight": torch.arange(4.0).to(torch.float16), "norm": torch.ones(2)})
    (tmp_path / "run/config.json").write_text('{"model_type": "mine", "dtype": "bfloat16"}')
    outputs = open_checkpoint(tmp_path / "run", dtype="auto").exporter.plan.outputs
    assert {output.name: output.dtype for output in outputs} == {"weight": torch.float16, "norm": torch.bfloat16}


def test_a_tied_head_that_differs_is_written_and_the_config_says_so(run, model, tmp_path):
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_dict[HEAD][-1, -1] += 1
    save(tmp_path / "run/step-1", state_dict)
    model.config.save_pretrained(tmp_path / "run")
    opened = open_checkpoint(tmp_path / "run")
    assert opened.heeds_config
    opened.save(tmp_path / "out")
    assert_holds(tmp_path / "out", state_dict)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_without_a_config_no_model_is_built(model, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_export.opening.meta_twin", lambda *_, **__: pytest.fail("this imports transformers"))
    flat = {EMBEDDING: model.state_dict()[EMBEDDING].flatten()}
    export_checkpoint(save(tmp_path / "step-1", flat), tmp_path / "out")
    assert_holds(tmp_path / "out", flat)


def test_the_hits_of_patterns_are_told(run, tmp_path):
    report = export_checkpoint(run, tmp_path / "out", include=["layers", "model.norm.*"], exclude=["mlp"])
    assert report.notes[:2] == ["include layers: 24 of 26 tensors", "include model.norm.*: 1 of 26 tensors"]
    assert report.notes[2] == "exclude mlp: 6 of 26 tensors"
    assert report.num_tensors == 19


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_a_device_that_is_there(device, run, tmp_path):
    export_checkpoint(run, tmp_path / "out", device=device)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", ""])
def test_a_device_that_is_not(device, run, tmp_path):
    with pytest.raises(UsageError, match="a device that cannot be used here"):
        export_checkpoint(run, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


def test_files_that_are_read_are_not_replaced(run, base, tmp_path):
    before = tree(run), tree(base)
    with pytest.raises(UsageError) as caught:
        export_checkpoint(run, run)
    fix = "Write into another folder."
    assert str(caught.value) == f"files that are read would be replaced in {run}: found config.json. {fix}"
    (tmp_path / "link").symlink_to(base)
    for out in (base, tmp_path / "link", base / ".." / base.name):
        with pytest.raises(UsageError) as caught:
            export_checkpoint(run, out, base_model=base, overwrite=True)
        assert str(caught.value) == f"the base model would be replaced in {out}. {fix}"
    assert (tree(run), tree(base)) == before


def test_the_folder_of_the_checkpoint_may_be_written_into(model, base, tmp_path):
    step = save(tmp_path / "step-1", model.state_dict())
    before = tree(step)
    for _ in range(2):
        export_checkpoint(step, step, base_model=base)
    assert_holds(step, untied(model))
    assert {name: data for name, data in tree(step).items() if name in before} == before


def test_a_link_to_a_file_that_is_read_is_replaced_itself(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").symlink_to(run / "config.json")
    before = tree(run)
    export_checkpoint(run, out)
    assert not (out / "config.json").is_symlink()
    assert tree(run) == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param({"dtype": "float8_e4m3fn"}, UsageError, id="dtype"),
        pytest.param({"format": "gguf"}, UsageError, id="format"),
        pytest.param({"max_shard_size": "5 apples"}, UsageError, id="size"),
        pytest.param({"prefix": "critic"}, NotFoundError, id="prefix"),
        pytest.param({"base_model": "no/such model"}, NotFoundError, id="base-model"),
        pytest.param({"include": ["nothing"]}, UsageError, id="pattern"),
    ],
)
def test_what_cannot_work_leaves_no_folder(options, error, run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error):
        export_checkpoint(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_ranks_share_the_writing_and_the_files_are_those_of_one(run, base, tmp_path):
    def export():
        delivered = []
        opened = open_checkpoint(run, base_model=base, ranks=(0, 1, 2), rank=dist.get_rank())
        report = opened.save(tmp_path / "three", max_shard_size="4KB", delivered=delivered.append)
        return sum(delivered), report.num_bytes, opened.notes

    results = run_ranks(export, 3)
    export_checkpoint(run, tmp_path / "one", base_model=base, max_shard_size="4KB")
    assert tree(tmp_path / "three") == tree(tmp_path / "one")
    shares, totals, notes = zip(*results, strict=True)
    assert sum(shares) == totals[0]
    assert max(shares) < totals[0] / 2
    assert len(set(map(str, notes))) == 1


def test_ties_are_compared_in_parts_by_all_ranks(tmp_path, monkeypatch):
    """One row differs, and one rank alone reads it; all of them must know."""
    monkeypatch.setattr("fsdp_export.ties.CHUNK_BYTES", 1)
    model = hf_model("qwen2-tied")
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_dict[HEAD][4] += 1
    save(tmp_path / "run/step-1", state_dict)
    model.config.save_pretrained(tmp_path / "run")

    def look():
        return open_checkpoint(tmp_path / "run", ranks=(0, 1, 2), rank=dist.get_rank()).exporter.plan.untied

    assert run_ranks(look, 3) == [(HEAD,)] * 3


def test_an_error_on_one_rank_is_that_of_all(run, base, tmp_path):
    lost = tmp_path / "lost"

    def export():
        rank = dist.get_rank()
        with pytest.raises(SourceError) as caught:
            open_checkpoint(lost if rank == 1 else run, ranks=(0, 1), rank=rank)
        return str(caught.value)

    lost.mkdir()
    (lost / "__0_0.distcp").touch()
    one, other = run_ranks(export, 2)
    assert one == other
    assert one.startswith("rank 1 (")
    assert f"no .metadata in {lost}" in one


def _local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def test_save_checkpoint_passes_its_choices_on(tmp_path):
    def save_it():
        model = shard(tiny(), "1d", 2)
        values = {name: _local(value) + 1 for name, value in model.state_dict().items()}
        return save_checkpoint(
            model,
            tmp_path / "out",
            state_dict=values,
            dtype="bfloat16",
            exclude=["blocks"],
            timeout=5.0,
            format="safetensors",
            fsync=False,
        ).num_tensors

    expected = {
        name: (tensor + 1).to(torch.bfloat16) if tensor.is_floating_point() else tensor + 1
        for name, tensor in tiny().state_dict().items()
        if "blocks" not in name and name != "head.weight"
    }
    assert run_ranks(save_it, 2) == [len(expected)] * 2
    assert_holds(tmp_path / "out", expected)


@pytest.mark.parametrize("way", ["itself", "a link to it", "links in it", "the files it links to"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_checkpoint_is_not_exported_over_itself(way, name, tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "folder"
    folder.mkdir()
    tensors = {"w": torch.arange(6.0)}
    (torch.save if name.endswith(".bin") else save_file)(tensors, folder / name)
    source = folder
    if way == "a link to it":
        out = tmp_path / "link"
        out.symlink_to(folder)
    elif way == "links in it":
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    elif way == "the files it links to":
        source = tmp_path / "links"
        source.mkdir()
        (source / name).symlink_to(folder / name)
    with pytest.raises(UsageError) as caught:
        export_checkpoint(source, out, dtype="bfloat16", overwrite=True)
    message = f"files that are read would be replaced in {out}: found {name}. Write into another folder."
    assert str(caught.value) == message
    assert len(list(folder.iterdir())) == 1
    export_checkpoint(source, tmp_path / "other", dtype="bfloat16")
    assert load_file(tmp_path / "other" / "model.safetensors")["w"].tolist() == tensors["w"].tolist()


def test_what_is_read_may_lie_beside_what_is_written(tmp_path):
    save(tmp_path, {"w": torch.arange(6.0)})
    for _ in range(2):
        export_checkpoint(tmp_path, tmp_path)
        assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_help_shows_what_is_loaded_at_first_use():
    shown = pydoc.plain(pydoc.render_doc(fsdp_export))
    for name in set(fsdp_export.__all__) - {"__version__"}:
        assert f"class {name}(" in shown or f"\n    {name}(" in shown, name
