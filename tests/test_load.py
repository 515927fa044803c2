"""Loading in one process: what is read, cast, tied, put into memory, and what is refused before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
import torch.distributed as dist
from hub_models import hub_model
from loading import assert_holds, on_meta, snapshot, spoiled
from models import hf_model, local, offloaded, shard, tiny
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_export import ExportError, load_checkpoint, save_checkpoint
from fsdp_export.errors import DisagreementError, SourceError, UsageError
from fsdp_export.sources.archive import DataFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the weights of `tiny`."""
    return saved(tmp_path / "tiny", tiny())


def saved(folder: Path, model: nn.Module) -> Path:
    save_checkpoint(model, folder, fsync=False)
    return folder


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return folder


def refused(model: nn.Module, path: Path, kind: type[ExportError] = SourceError, **options: Any) -> str:
    """Load what must be refused; return the message. The model must be what it was."""
    before = snapshot(model)
    with pytest.raises(kind) as caught:
        load_checkpoint(model, path, **options)
    assert type(caught.value) is kind
    assert_holds(model, before)
    return str(caught.value)


def test_values_go_into_the_memory_that_an_optimizer_knows(folder: Path) -> None:
    expected = snapshot(tiny())
    model: Any = spoiled(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    memory = {name: value.data_ptr() for name, value in model.state_dict(keep_vars=True).items()}
    read: list[int] = []
    report = load_checkpoint(model, folder, delivered=read.append)
    assert_holds(model, expected)
    assert memory == {name: value.data_ptr() for name, value in model.state_dict(keep_vars=True).items()}
    assert model.head.weight is model.embed.weight is optimizer.param_groups[0]["params"][1]
    assert (report.source, report.num_tensors) == (folder, len(expected) - 1)
    num_bytes = sum(value.nbytes for name, value in expected.items() if name != "head.weight")
    assert report.num_bytes == sum(read) == num_bytes
    assert report.description.startswith("Hugging Face folder")
    found, loaded = str(report).splitlines()
    assert found == f"found {folder}: {report.description}"
    assert loaded.startswith(f"loaded {report.num_tensors} tensors, of which this rank read ")


def test_autograd_notices_that_values_changed(folder: Path) -> None:
    model: Any = tiny()
    loss = model(torch.tensor([1, 2])).pow(2).sum()
    load_checkpoint(model, folder)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_all_that_does_not_fit_is_told_at_once(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["two_rows"], tensors["blocks.0.up.bias"]
        tensors["new"] = torch.zeros(1)
        tensors["blocks.1.up.weight"] = torch.zeros(7, 9)
        tensors["table"] = torch.zeros(3, 2, dtype=torch.int32)

    changed(folder, change)
    message = refused(tiny(), folder)
    assert message == (
        f"a checkpoint that does not fit the model in {folder}: found 2 missing: blocks.0.up.bias, two_rows; "
        "1 unexpected: new; 2 that do not fit: blocks.1.up.weight: expected [7, 8], found [7, 9], "
        "table: expected float32, found int32. Load it into the model that it was saved from."
    )
    assert "missing" not in refused(tiny(), folder, strict=False)
    with pytest.raises(SourceError) as caught:
        load_checkpoint(tiny(), folder)
    opened = [Path(os.path.realpath(link)) for link in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.is_relative_to(folder)]
    assert "does not fit" in str(caught.value)


def test_what_is_missing_and_unexpected_may_be_passed_over(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update(new=tensors.pop("two_rows")))
    model = spoiled(tiny())
    report = load_checkpoint(model, folder, strict=False)
    assert (report.missing, report.unexpected) == (("two_rows",), ("new",))
    assert str(report).splitlines()[1:-1] == ["missing: two_rows", "unexpected: new"]
    expected = snapshot(tiny()) | {"two_rows": torch.full((2, 3), 3.0)}
    assert_holds(model, expected)
    assert "Give strict" not in refused(model, folder)
    assert "give strict=False" in refused(model, folder)


def test_floating_tensors_are_cast_as_they_are_read_or_refused(folder: Path) -> None:
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in tiny().state_dict().items()
    }
    model = spoiled(tiny().bfloat16())
    message = refused(model, folder, cast=False)
    assert "13 that do not fit: " in message
    assert "blocks.0.up.weight: expected bfloat16, found float32" in message
    load_checkpoint(model, folder)
    assert_holds(model, expected)
    wide = spoiled(tiny())
    load_checkpoint(wide, saved(folder.parent / "half", model))
    assert_holds(wide, {name: value.to(wide.state_dict()[name].dtype) for name, value in expected.items()})


def test_ties_count_under_any_of_their_names(folder: Path) -> None:
    expected = snapshot(tiny())
    changed(folder, lambda tensors: tensors.update({"head.weight": tensors.pop("embed.weight")}))
    model = spoiled(tiny())
    load_checkpoint(model, folder)
    assert_holds(model, expected)
    changed(folder, lambda tensors: tensors.update({"embed.weight": tensors["head.weight"].clone()}))
    load_checkpoint(spoiled(model), folder)
    assert_holds(model, expected)
    changed(folder, lambda tensors: tensors["head.weight"].add_(1))
    message = refused(model, folder)
    assert message.startswith("two values for weights that the model has tied for 'head.weight'")
    load_checkpoint(tiny(tied=False), folder)


def test_a_tie_that_the_config_declares_fills_both_of_two_parameters(tmp_path: Path) -> None:
    tied = saved(tmp_path / "tied", hf_model("llama-tied"))
    model: Any = spoiled(hf_model("llama-tied"))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    load_checkpoint(model, tied)
    saved_as: Any = hf_model("llama-tied")
    assert torch.equal(model.lm_head.weight, saved_as.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    assert "1 missing: lm_head.weight" in refused(hf_model("llama"), tied)


def test_buffers_that_old_versions_saved_are_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path / "llama", hf_model("llama"))
    changed(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert load_checkpoint(hf_model("llama"), path).unexpected == ()


def test_experts_that_are_missing_are_told_by_the_names_of_the_hub(tmp_path: Path) -> None:
    path = saved(tmp_path / "moe", hub_model("qwen3-moe"))
    gone = "model.layers.1.mlp.experts.2"
    changed(path, lambda tensors: [tensors.pop(f"{gone}.{name}.weight") for name in ("up_proj", "down_proj")])
    message = refused(hub_model("qwen3-moe"), path)
    assert "2 that do not fit: model.layers.1.mlp.experts.down_proj: expected [4, 16, 8], found [3, 16, 8]" in message
    assert "model.layers.1.mlp.experts.gate_up_proj: RuntimeError when it is made of 7 tensors" in message
    changed(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0.mlp.experts" in name])
    assert "12 missing: model.layers.0.mlp.experts.0.down_proj.weight" in refused(hub_model("qwen3-moe"), path)


def test_memory_for_a_module_on_meta_keeps_its_parameters_and_ties(folder: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.again = self.inner
            self.steps: torch.Tensor
            self.register_buffer("steps", torch.arange(3), persistent=False)
            self.also = self.steps
            self.kept = nn.Parameter(torch.ones(2, device="cpu"), requires_grad=False)

        def reset_buffers(self) -> None:
            self.steps.copy_(torch.arange(3))

    expected = Whole()
    path = saved(folder.parent / "whole", expected)
    model: Any = on_meta(Whole)
    optimizer = torch.optim.SGD(model.parameters())
    parameters = list(model.parameters())
    load_checkpoint(model, path)
    assert_holds(model, snapshot(expected))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is parameters[0]
    assert [parameter.requires_grad for parameter in parameters] == [False, True, True]
    assert model.again.weight is model.inner.weight
    assert model.steps.tolist() == [0, 1, 2]
    assert model.also is model.steps


def test_tables_that_nobody_computes_are_named_before_anything_has_memory(folder: Path) -> None:
    model: Any = on_meta(tiny)
    with pytest.raises(SourceError, match=r"no module computes: found cache\. Put them on a device before loading"):
        load_checkpoint(model, folder)
    assert all(value.is_meta for value in model.state_dict().values())
    model.cache = torch.zeros(4)
    load_checkpoint(model, folder)
    assert_holds(model, snapshot(tiny()))
    changed(folder, lambda tensors: tensors.pop("two_rows"))
    model = on_meta(tiny)
    with pytest.raises(SourceError, match="on the meta device that the checkpoint lacks: found two_rows"):
        load_checkpoint(model, folder, strict=False)


class Loading(adapters.Adapter):
    """Undoes what the adapter does, and doubles the norms."""

    def from_hf(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = dict(state_dict)
        made: dict[str, torch.Tensor] = {}
        for new, name in (("tok_embeddings.weight", "model.embed_tokens.weight"), ("output.weight", "lm_head.weight")):
            made |= {new: tensors[name]} if name in tensors else {}
        for layer in {name.split(".")[2] for name in tensors if ".layers." in name}:
            own, stored = f"layers.{layer}.", f"model.layers.{layer}."
            of = {name.removeprefix(stored): tensor for name, tensor in tensors.items() if name.startswith(stored)}
            if "q_proj.weight" in of:
                made[f"{own}wq.weight"] = of["q_proj.weight"].view(2, 2, 2, 8).transpose(1, 2).reshape(8, 8)
            if "gate_proj.weight" in of:
                made[f"{own}gate_up.weight"] = torch.cat([of["gate_proj.weight"], of["up_proj.weight"]])
            for kind in ("w1", "w2"):
                if f"experts.0.{kind}.weight" in of:
                    parts = [of[f"experts.{index}.{kind}.weight"] for index in range(adapters.NUM_EXPERTS)]
                    made[own + kind] = torch.stack([part.t() if kind == "w2" else part for part in parts])
            if "qk.weight" in of:
                made |= dict(zip((f"{own}qk.0", f"{own}qk.1"), of["qk.weight"].split([6, 2]), strict=True))
            for leaf in ("weight", "bias"):
                if f"input_layernorm.{leaf}" in of:
                    made[f"{own}norm.{leaf}"] = of[f"input_layernorm.{leaf}"] * 2
        return made


def test_an_adapter_loads_what_it_made(tmp_path: Path) -> None:
    path = tmp_path / "adapted"
    save_checkpoint(adapters.Model(), path, adapter=adapters.Adapter(), fsync=False)

    def expected() -> nn.Module:
        model: Any = adapters.Model()
        with torch.no_grad():
            for layer in model.layers:
                layer.norm.weight.mul_(2)
                layer.norm.bias.mul_(2)
        return model

    def on_rank() -> None:
        for layout in ("1d", "dim1"):
            model = spoiled(shard(adapters.Model(), layout, 2))
            report = load_checkpoint(model, path, adapter=Loading(), strict=False)
            assert report.missing == ("layers.0.steps", "layers.1.steps")
            known = snapshot(shard(expected(), layout, 2))
            assert_holds(model, known | {name: torch.tensor(3) for name in report.missing})

    on_rank_alone = spoiled(adapters.Model())
    load_checkpoint(on_rank_alone, path, adapter=Loading(), strict=False)
    run_ranks(on_rank, 2)
    with pytest.raises(UsageError, match="no adapter that can load"):
        load_checkpoint(adapters.Model(), path, adapter=adapters.Adapter())


def truncated(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def without_a_file(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def with_another_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))


def overlapping(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    _, second = sorted((entry for name, entry in header.items() if name[0] != "_"), key=lambda e: e["data_offsets"])[:2]
    second["data_offsets"] = [offset - 4 for offset in second["data_offsets"]]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


BAD = {
    "truncated": (truncated, "a truncated safetensors file in {folder}/model-00002-of-00003.safetensors"),
    "missing file": (without_a_file, "missing model-00002-of-00003.safetensors in {folder}"),
    "index": (with_another_index, "tensors that the index lists and its files do not have in {folder}/model.saf"),
    "overlap": (overlapping, "a damaged safetensors header for"),
}


def test_bad_files_are_one_error_on_every_rank_and_the_model_is_what_it_was(tmp_path: Path) -> None:
    for name, (spoil, _) in BAD.items():
        save_checkpoint(hf_model("llama"), tmp_path / name, max_shard_size=9000, fsync=False)
        spoil(tmp_path / name)
    save_checkpoint(hf_model("llama"), tmp_path / "good", max_shard_size=9000, fsync=False)
    save_checkpoint(hf_model("qwen2"), tmp_path / "other", fsync=False)

    def on_rank() -> list[str]:
        model = shard(hf_model("llama"), "1d", 2)
        messages = [refused(model, tmp_path / name) for name in BAD]
        messages.append(refused(model, tmp_path / "other"))
        messages.append(refused(model, tmp_path / ("good", "other")[dist.get_rank()]))
        messages.append(refused(model, tmp_path / "good", DisagreementError, strict=bool(dist.get_rank())))
        load_checkpoint(spoiled(model), tmp_path / "good")
        assert_holds(model, snapshot(shard(hf_model("llama"), "1d", 2)))
        return messages

    messages, others = run_ranks(on_rank, 2)
    assert messages == others
    for name, message in zip(BAD, messages, strict=False):
        assert message.startswith(BAD[name][1].format(folder=tmp_path / name)), message
    assert "unexpected: model.layers.0.self_attn.k_proj.bias" in messages[len(BAD)]
    assert "rank 1" in messages[len(BAD) + 1]
    assert messages[-1].startswith("the ranks would load different checkpoints")


def test_a_disk_that_fails_later_says_that_the_model_is_loaded_in_part(folder: Path, monkeypatch) -> None:
    read_into = DataFiles.read_into

    def failing(self: DataFiles, file: str, offset: int, target: memoryview) -> None:
        if len(target) == 96:  # the rows of blocks.*.up.weight that no header has
            raise SourceError("a data file that cannot be read", file=file)
        read_into(self, file, offset, target)

    monkeypatch.setattr(DataFiles, "read_into", failing)

    def on_rank() -> str:
        with pytest.raises(SourceError) as caught:
            load_checkpoint(shard(tiny(), "1d", 2), folder)
        return str(caught.value)

    (text,) = set(run_ranks(on_rank, 2))
    assert text.startswith("the model is loaded in part and must not be used: ")
    assert text.endswith("a data file that cannot be read in model.safetensors")


def test_each_rank_reads_what_it_holds_and_headers(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(64, 4096))
            self.narrow = nn.Parameter(torch.randn(300, 64))
            self.vector = nn.Parameter(torch.randn(1000))

    path = saved(tmp_path / "wide", Wide())
    header_bytes = (path / "model.safetensors").stat().st_size - sum(each.nbytes for each in Wide().parameters())

    def on_rank() -> None:
        for layout in ("1d", "dim1", "tp") if dist.get_world_size() == 4 else ("1d", "dim1"):
            model: Any = spoiled(shard(Wide(), layout, dist.get_world_size(), offload_policy=offloaded()))
            read: list[int] = []
            read_into = DataFiles.read_into

            def counting(self, file, offset, target, read=read, read_into=read_into) -> None:
                read.append(len(target))
                read_into(self, file, offset, target)

            DataFiles.read_into = counting  # type: ignore[method-assign]
            load_checkpoint(model, path)
            DataFiles.read_into = read_into  # type: ignore[method-assign]
            assert_holds(model, snapshot(shard(Wide(), layout, dist.get_world_size())))
            held = {name: local(value).nbytes for name, value in model.named_parameters()}
            # Of columns whose runs are shorter than a page whole rows are read.
            has_short_runs = local(model.narrow).shape[1] < 64
            expected = sum(held.values()) + (300 * 64 * 4 - held["narrow"] if has_short_runs else 0)
            assert sum(read) <= expected + header_bytes
            assert sum(read) >= sum(held.values())

    run_ranks(on_rank, 2)
    run_ranks(on_rank, 4)


def test_what_cannot_be_loaded_into_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to load into: expected a torch\.nn\.Module, found dict"):
        load_checkpoint({}, folder)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="does not exist"):
        load_checkpoint(tiny(), folder / "nowhere")
