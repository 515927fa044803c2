"""Adapters, against what they make of the full state dict at once."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import NUM_EXPERTS, Adapter, Model, OneByOne
from dcp_folders import save
from exports import assert_exports, assert_same
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter, export_checkpoint
from fsdp_export.conversion.adapter import load_adapter
from fsdp_export.conversion.cut import Conversion
from fsdp_export.errors import PlanError, UsageError
from fsdp_export.plan import Plan
from fsdp_export.sinks.base import MemorySink
from fsdp_export.spec import Sharding, TensorSpec

Tensors = dict[str, torch.Tensor]


def converted(adapter: Any, state_dict: Mapping[str, torch.Tensor]) -> Tensors:
    if isinstance(adapter, OneByOne):
        pairs = (adapter.convert_single_tensor_to_hf(name, tensor) for name, tensor in state_dict.items())
        return dict(itertools.chain.from_iterable(pairs))
    return dict(adapter.to_hf(state_dict))


def in_order(tensors: Tensors, like: Mapping[str, object]) -> Tensors:
    assert tensors.keys() == like.keys()
    return {name: tensors[name] for name in like}


def convert(call: Callable[[Tensors], Mapping[str, Any]], *shapes: tuple[int, ...]) -> Conversion:
    sharding = Sharding.replicated((0,))
    specs = [TensorSpec("abc"[index], shape, torch.float32, sharding) for index, shape in enumerate(shapes)]
    return Conversion(call, specs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "step-5", Model().state_dict())


@pytest.mark.parametrize("make", [Adapter, OneByOne])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_checkpoint_is_exported_as_the_adapter_converts_it(make, dtype, folder, tmp_path):
    expected = converted(make(), Model().state_dict())
    if dtype != "keep":
        expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    report = export_checkpoint(folder, tmp_path / "out", adapter=make(), dtype=dtype, fsync=False)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(in_order(saved, expected), expected)
    unused = 2 if make is Adapter else 6
    assert any(note.startswith(f"the adapter makes nothing of {unused}: layers.0.") for note in report.notes)


def test_what_is_renamed_or_cut_into_rows_is_read_by_rows(folder, tmp_path):
    adapter = Adapter()
    exporter = Exporter(Model(), adapter=adapter)
    by_rows = {step.by_unit[0].name: len(step.outputs) for step in exporter.plan.steps if step.by_unit}
    layer = {"gate_up.weight": 2, "w1": NUM_EXPERTS, "w2": NUM_EXPERTS, "norm.weight": 1, "norm.bias": 1}
    assert by_rows == {
        "tok_embeddings.weight": 1,
        **{f"layers.{index}.{name}": count for index in range(2) for name, count in layer.items()},
        "output.weight": 1,
    }
    whole = [[spec.name for spec in step.whole] for step in exporter.plan.steps if step.whole]
    assert sorted(whole) == sorted(
        [f"layers.{index}.{name}" for name in names]
        for index in range(2)
        for names in (["wq.weight"], ["qk.0", "qk.1"])
    )
    assert sorted(adapter.calls, reverse=True) == [20, 2, 2, 1, 1]  # once for all, and for each step that computes


def test_bytes_that_an_adapter_only_renames_go_from_file_to_file(folder, tmp_path, monkeypatch):
    copied = []
    from fsdp_export.sinks import files

    copy_bytes = files.copy_bytes
    monkeypatch.setattr(files, "copy_bytes", lambda extent, *args: copied.append(extent) or copy_bytes(extent, *args))
    export_checkpoint(
        folder, tmp_path / "out", adapter=Adapter(), include=["*.experts.*.w1.weight", "*norm*", "lm_head"]
    )
    expected = {
        name: tensor
        for name, tensor in Adapter().to_hf(Model().state_dict()).items()
        if ".w1." in name or "norm" in name or "lm_head" in name
    }
    assert_same(in_order(load_file(tmp_path / "out" / "model.safetensors"), expected), expected)
    assert sum(extent.num_bytes for extent in copied) == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sharded_model_is_exported_as_the_adapter_converts_it(world_size, tmp_path):
    def check() -> None:
        expected = converted(Adapter(), Model().state_dict())
        model = Model()
        shape = (2, 2) if world_size == 4 else (world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        exporter = Exporter(model, adapter=Adapter(), bucket_bytes=300)
        order = [name for name, _ in exporter.tensors()]
        assert_exports(model, {name: expected[name] for name in order}, tmp_path, adapter=Adapter(), bucket_bytes=300)

    run_ranks(check, world_size)


def test_ranks_share_a_checkpoint_that_is_converted(folder, tmp_path):
    from fsdp_export.opening import open_checkpoint

    def check() -> None:
        checkpoint = open_checkpoint(folder, adapter=Adapter(), ranks=(0, 1), rank=dist.get_rank())
        checkpoint.save(tmp_path / "out", fsync=False)

    run_ranks(check, 2)
    expected = Adapter().to_hf(Model().state_dict())
    assert_same(in_order(load_file(tmp_path / "out" / "model.safetensors"), expected), expected)


def test_patterns_are_of_the_adapters_names(folder, tmp_path):
    report = export_checkpoint(folder, tmp_path / "out", adapter=Adapter(), exclude=["experts", "lm_head"])
    names = [name for name in Adapter().to_hf(Model().state_dict()) if "experts" not in name and "lm_head" not in name]
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(names)
    assert f"exclude lm_head: 1 of {len(names) + 17:,} tensors" in report.notes
    with pytest.raises(UsageError, match="'tok_embeddings' matches none of"):
        export_checkpoint(folder, tmp_path / "out", adapter=Adapter(), include=["tok_embeddings"])


def test_tied_names_are_those_that_the_adapter_makes(tmp_path):
    state_dict = {"tok.weight": torch.randn(8, 4), "out.weight": torch.zeros(8, 4), "norm.weight": torch.ones(4)}
    names = {"tok": "model.embed_tokens", "out": "lm_head", "norm": "model.norm"}
    adapter = SimpleNamespace(to_hf=lambda t: {f"{names[name.partition('.')[0]]}.weight": t[name] for name in t})
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    sizes = {"hidden_size": 4, "vocab_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    for head, is_tied in ((state_dict["tok.weight"], True), (torch.ones(8, 4), False)):
        folder = save(tmp_path / f"step-{is_tied:d}", {**state_dict, "out.weight": head})
        export_checkpoint(folder, tmp_path / "out", adapter=adapter)
        saved = load_file(tmp_path / "out" / "model.safetensors")
        assert ("lm_head.weight" not in saved) is is_tied
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is is_tied


ROWS = {
    "renamed": (lambda t: {"x": t["a"]}, {"x": (0, 4)}),
    "some rows": (lambda t: {"x": t["a"][1:3], "y": t["a"][3:]}, {"x": (1, 3), "y": (3, 4)}),
    "a row without its dim": (lambda t: {"x": t["a"][2]}, {"x": (2, 3)}),
    "a row as a matrix": (lambda t: {"x": t["a"][2].view(3, 2)}, {"x": (2, 3)}),
    "rows of other shape": (lambda t: {"x": t["a"].view(4, 2, 3)}, {"x": (0, 4)}),
    "twice the same": (lambda t: {"x": t["a"], "y": t["a"]}, {"x": (0, 4), "y": (0, 4)}),
    "flat": (lambda t: {"x": t["a"].view(-1)}, {"x": None}),
    "columns": (lambda t: {"x": t["a"][:, :3]}, {"x": (0, (1,))}),
    "transposed": (lambda t: {"x": t["a"].t()}, {"x": None}),
    "every other row": (lambda t: {"x": t["a"][::2]}, {"x": None}),
    "a copy": (lambda t: {"x": t["a"].clone()}, {"x": (0, 4)}),
    "cast": (lambda t: {"x": t["a"].half()}, {"x": None}),
    "other bits": (lambda t: {"x": t["a"].view(torch.int32)}, {"x": None}),
    "a copy that is changed": (lambda t: {"x": t["a"].clone().mul_(2)}, {"x": None}),
    "written out": (lambda t: {"x": torch.add(t["a"], t["b"], out=torch.empty_like(t["a"]))}, {"x": None}),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_told_from_what_is_computed(case):
    call, expected = ROWS[case]
    conversion = convert(call, (4, 6), (4, 6))
    parts = {name: output.part for name, output in conversion._traced.items()}
    found = {name: part and (part.rows if part.inner is None else part.inner) for name, part in parts.items()}
    assert found == expected
    tensors = {name: torch.randn(4, 6) for name in "ab"}
    full = call({name: tensor.clone() for name, tensor in tensors.items()})
    for step in conversion.steps(conversion.names, lambda _: None):
        assert bool(step.by_unit) is (expected[step.outputs[0].name] is not None)
        for units in [(0, step.num_units)] if step.whole else [(0, 1), (1, 3), (3, 4)]:
            inputs = [tensors[spec.name][slice(*units)] for spec in step.by_unit]
            for piece in step.convert(inputs + [tensors[spec.name].clone() for spec in step.whole], units[0]):
                stop = piece.first_row + (piece.tensor.shape[0] if piece.tensor.dim() else 1)
                expected_rows = full[piece.info.name]
                if piece.tensor.shape != expected_rows.shape:
                    expected_rows = expected_rows[piece.first_row : stop]
                assert torch.equal(piece.tensor, expected_rows)


SQUARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(1, 2),
    "experts first": lambda t: t.permute(2, 0, 1),
    "turned around": lambda t: t.permute(2, 1, 0),
    "one expert for all": lambda t: t[:1].expand(4, 4, 4),
    "one row for all": lambda t: t[:, :1].expand(4, 4, 4),
    "diagonal": torch.diagonal,
    "the same": lambda t: t.permute(0, 1, 2),
    "flattened and back": lambda t: t.reshape(16, 4).view(4, 4, 4),
}


@pytest.mark.parametrize("case", SQUARES)
def test_the_shape_of_a_square_says_nothing(case, tmp_path):
    tensor = torch.randn(4, 4, 4)
    folder = save(tmp_path / "step-1", {"w": tensor})
    adapter = SimpleNamespace(to_hf=lambda tensors: {"x": SQUARES[case](tensors["w"])})
    export_checkpoint(folder, tmp_path / "out", adapter=adapter, fsync=False)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], SQUARES[case](tensor))


@pytest.mark.parametrize("dtype", ["keep", "bfloat16", "float32"])
def test_a_scalar_becomes_a_vector(dtype, tmp_path):
    folder = save(tmp_path / "step-1", {"scale": torch.tensor(1.5, dtype=torch.float16)})
    adapter = SimpleNamespace(to_hf=lambda tensors: {"scale": tensors["scale"].reshape(1)})
    export_checkpoint(folder, tmp_path / "out", adapter=adapter, dtype=dtype)
    assert load_file(tmp_path / "out" / "model.safetensors")["scale"].tolist() == [1.5]


def test_outputs_of_the_same_inputs_are_made_together_and_stay_in_order():
    def call(tensors: Tensors) -> Tensors:
        made = {"z": tensors["c"] * 2} if "c" in tensors else {}
        if "a" in tensors and "b" in tensors:
            made |= {"x": tensors["a"] + tensors["b"], "y": torch.stack([tensors["b"], tensors["a"]])}
        return made | ({"w": tensors["c"] + 1} if "c" in tensors else {})

    conversion = convert(call, (2,), (2,), (3,))
    steps = conversion.steps(conversion.names, lambda _: torch.float16)
    made = [([spec.name for spec in step.whole], [output.name for output in step.outputs]) for step in steps]
    assert made == [(["c"], ["z", "w"]), (["a", "b"], ["x", "y"])]
    plan = Plan(tuple(steps), names=conversion.names)
    assert [(output.name, output.dtype) for output in plan.outputs] == [(name, torch.float16) for name in "zxyw"]


def test_a_shared_input_does_not_join_all_that_it_is_used_for():
    def call(tensors: Tensors) -> Tensors:
        return {f"{name}.scaled": tensors[name] * tensors["c"] for name in "ab" if name in tensors}

    conversion = convert(call, (2,), (3,), (1,))
    steps = conversion.steps(conversion.names, lambda _: None)
    assert [[spec.name for spec in step.whole] for step in steps] == [["a", "c"], ["b", "c"]]


def test_plans_that_take_other_rows_have_other_digests():
    def halves(names: str) -> Plan:
        conversion = convert(lambda t: dict(zip(names, t["a"].chunk(2), strict=True)), (4, 6))
        return Plan(tuple(conversion.steps(conversion.names, lambda _: None)), names=tuple(sorted(names)))

    assert halves("xy").digest == halves("xy").digest != halves("yx").digest


class MissesThreads:
    """Collects what it makes in an attribute, as adapters may that are called once."""

    def to_hf(self, tensors: Tensors) -> Tensors:
        self.out = {}
        for name, tensor in tensors.items():
            self.out[f"hf.{name}"] = tensor.t().contiguous()
            time.sleep(0.002)
        return dict(self.out)


def test_an_adapter_is_called_by_one_thread_at_a_time(tmp_path):
    state_dict = {f"{index}": torch.randn(4, 4) for index in range(40)}
    folder = save(tmp_path / "step-1", state_dict)
    export_checkpoint(folder, tmp_path / "out", adapter=MissesThreads(), fsync=False)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(in_order(saved, expected := MissesThreads().to_hf(state_dict)), expected)


class Turns:
    """Does otherwise when there are values."""

    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.turn = turn

    def to_hf(self, tensors: Tensors) -> Tensors:
        return {name: self.turn(tensor) if not tensor.is_meta else tensor + 1 for name, tensor in tensors.items()}


def test_an_adapter_that_does_otherwise_with_values_is_caught(folder, tmp_path):
    def fails(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    for turn, message in (
        (
            lambda tensor: tensor.new_empty((2, *tensor.shape)),
            "the conversion makes something else of values than was ",
        ),
        (fails, "the conversion fails on tensors with values: found ValueError: boom"),
    ):
        with pytest.raises(PlanError, match=message):
            export_checkpoint(folder, tmp_path / "out", adapter=Turns(turn), fsync=False)
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))


FAILS = "the conversion fails on tensors without values: found {}. It must fit the checkpoint's names and shapes, "
REFUSED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "fails": (lambda t: {"x": t["missing"]}, FAILS.format("KeyError: 'missing'")),
    "looks at values": (
        lambda t: {"x": t["a"] if t["a"].sum().item() else t["b"]},
        FAILS.format("RuntimeError: Tensor.item() cannot be called on meta tensors"),
    ),
    "no dict": (lambda t: [t["a"]], "the conversion returns no state dict: expected a dict, found list"),
    "no tensor": (lambda t: dict.fromkeys(t, 3), "the conversion returns what is no plain tensor: found 'a', 'b'"),
    "of nothing": (lambda t: {"x": torch.zeros(len(t))}, "the conversion makes a tensor of no input for 'x'. "),
    "nothing": (
        lambda t: {name: tensor for name, tensor in t.items() if name == "c"},
        "the conversion knows none of the tensors: found 2 tensors: a, b. ",
    ),
    "changes its input": (
        lambda t: {"x": t["a"].mul_(2), "y": t["b"][1:].zero_()},
        "the conversion changes tensors in place: found a, b. ",
    ),
    "writes out into its input": (
        lambda t: {"x": torch.add(t["b"], 1, out=t["a"])},
        "the conversion changes tensors in place: found a. ",
    ),
    "whole only": (
        lambda t: {"x": t["a"] * 2, "y": t["b"] * 2} if len(t) == 2 else {},
        "the conversion makes it of the whole state dict only for 'x': expected [4, 6] torch.float32 of a, found none",
    ),
}


def planned(call: Callable[[Tensors], Any]) -> None:
    conversion = convert(call, (4, 6), (4, 6))
    conversion.steps(conversion.names, lambda _: None)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        planned(call)
    assert str(caught.value).startswith(message)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_adapters.py").write_text(
        "class Adapter:\n"
        "    def __init__(self, factor=1): self.factor = factor\n"
        "    def to_hf(self, state_dict): return {f'hf.{k}': v for k, v in state_dict.items()}\n"
        "class Needs(Adapter):\n"
        "    def __init__(self, model_config): pass\n"
        "class Asks(Adapter):\n"
        "    def __init__(self, config, hf_assets_path=None): self.asked = config, hf_assets_path\n"
        "class Spec:\n"
        "    def __init__(self, flavor, *, tied=False): self.model, self.state_dict_adapter = (flavor, tied), Titan\n"
        "class Titan(Adapter):\n"
        "    def __init__(self, model_config, hf_assets_path): self.asked = model_config, hf_assets_path\n"
        "adapter = Adapter(5)\n"
        "def broken(): raise RuntimeError('no flavor')\n"
        "number = 3\n"
    )
    yield
    sys.modules.pop("their_adapters", None)


@pytest.mark.usefixtures("module")
def test_adapters_are_named_made_and_given_what_they_ask_for(tmp_path):
    assert load_adapter("their_adapters:Adapter").factor == 1
    assert load_adapter("their_adapters:Adapter(3)").factor == 3
    assert load_adapter("their_adapters:adapter").factor == 5
    assert load_adapter("their_adapters:Asks", config={"a": 1}, assets=tmp_path).asked == ({"a": 1}, str(tmp_path))
    spec = load_adapter("their_adapters:Spec('8B', tied=True)", assets=tmp_path)
    assert spec.asked == (("8B", True), str(tmp_path))


MISNAMED = {
    "their_adapters": "an adapter that cannot be read: found their_adapters. Give package.module:Class, or ",
    "their_adapters:os;x": "an adapter that cannot be read: found their_adapters:os;x. ",
    "nowhere:Adapter": "the adapter {} cannot be made: found ModuleNotFoundError: No module named 'nowhere'. Install ",
    "their_adapters:Nothing": "the adapter {} cannot be made: found AttributeError: ",
    "their_adapters:broken": "the adapter {} cannot be made: found RuntimeError: no flavor. ",
    "their_adapters:Adapter(open('x'))": "the adapter {} cannot be made: found ValueError",
    "their_adapters:Needs": "Needs needs model_config, which is not known here. Name a function that makes the adapter",
    "their_adapters:number": "no adapter: expected an object with to_hf(state_dict) or convert_single_tensor_to_hf",
}


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("reference", MISNAMED)
def test_an_adapter_that_cannot_be_made_is_refused(reference):
    with pytest.raises(UsageError) as caught:
        load_adapter(reference)
    assert str(caught.value).startswith(MISNAMED[reference].format(reference))


def test_what_is_no_adapter_is_refused(folder, tmp_path):
    for adapter, message in ((3, "no adapter: expected an object with"), (Adapter, "a class for an adapter: ")):
        with pytest.raises(UsageError, match=message):
            export_checkpoint(folder, tmp_path / "out", adapter=adapter)
    with pytest.raises(UsageError, match="no adapter"):
        Exporter(Model(), adapter=object()).send(MemorySink())
