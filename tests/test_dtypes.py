"""Which tensors are cast to what, and what is said of it, in `config.json` too."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from dcp_folders import save
from exports import assert_same
from hub_models import hub_model
from models import hf_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter, collectives, export_checkpoint, save_checkpoint
from fsdp_export.cli import main
from fsdp_export.compat import all_gather_into
from fsdp_export.dtypes import Casts, DtypePolicy, model_dtype, scales_of_packed
from fsdp_export.errors import UsageError
from fsdp_export.spec import TensorInfo

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of cases F2 and F6: a router, a counter, and fp8 with its scales."""
    torch.manual_seed(0)
    tensors = {
        "layers.0.mlp.router.weight": torch.randn(4, 6),
        "layers.0.mlp.up.weight": torch.randn(7, 6),
        "layers.0.count": torch.tensor([2**40 + 1]),
        "layers.0.mask": torch.tensor([True, False]),
        "layers.1.up.weight": torch.randn(130, 200).to(FP8),
        "layers.1.up.weight_scale_inv": torch.rand(2, 2),
        "layers.1.up.bias": torch.randn(130),
        "layers.1.down.qweight": torch.arange(12, dtype=torch.int32).view(3, 4),
        "layers.1.down.scales": torch.rand(3).to(F16),
    }
    save(tmp_path / "run/step-1", tensors)
    return tensors


@pytest.mark.parametrize("source", ["dcp", "hub"])
def test_a_router_a_counter_and_packed_weights_keep_their_bits(source, mixed, tmp_path):
    """Cases F2, F5, F6."""
    run = tmp_path / "run"
    if source == "hub":
        (tmp_path / "hub").mkdir()
        save_file(mixed, tmp_path / "hub/model.safetensors")
        run = tmp_path / "hub"
    arguments = [run, "--out", tmp_path / "out", "--dtype", "bfloat16", "--keep-dtype", "router", "--verify"]
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "keep-dtype router: 1 of 9 tensors" in result.stdout.splitlines()
    saved = load_file(tmp_path / "out/model.safetensors")
    cast = {"layers.0.mlp.up.weight", "layers.1.up.bias"}
    expected = {name: bits(tensor.bfloat16() if name in cast else tensor) for name, tensor in mixed.items()}
    assert {name: bits(tensor) for name, tensor in saved.items()} == expected


def test_scales_that_train_beside_packed_weights_keep_their_bits(tmp_path):
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 4)
            self.up.weight = nn.Parameter(torch.randn(4, 6).to(FP8), requires_grad=False)
            self.up.weight_scale = nn.Parameter(torch.rand(4, 1))

    model = Packed()
    dtypes = {name: tensor.dtype for name, tensor in Exporter(model, dtype="bf16").tensors()}
    assert dtypes == {"up.weight": FP8, "up.bias": BF16, "up.weight_scale": F32}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"a.w": FP8, "a.w_scale_inv": F32, "a.input_scale": F32, "a.bias": F32}, {"w_scale_inv", "input_scale"}),
        ({"a.w": torch.uint8, "a.w.absmax": F32, "a.w.quant_map": F32}, {"w.absmax", "w.quant_map"}),
        ({"a.qweight": torch.int32, "a.qzeros": torch.int32, "a.scales": F16, "a.g_idx": torch.int32}, {"scales"}),
        ({"a.up_blocks": torch.uint8, "a.up_scales": torch.uint8, "a.up_bias": BF16}, set()),
        ({"a.up": FP8, "a.up_scale": F32, "a.upper": F32, "b.scale": F32}, {"up_scale"}),
        ({"a.position_ids": torch.int64, "a.scale": F32, "a.mask": torch.bool}, set()),
        ({"a.weight": BF16, "a.weight_scale": F32}, set()),
    ],
    ids=["fp8", "bitsandbytes", "gptq", "mxfp4", "fused", "indices", "nothing-packed"],
)
def test_what_unpacks_weights(tensors, expected):
    found = scales_of_packed(TensorInfo(name, (2,), dtype) for name, dtype in tensors.items())
    assert found == {f"a.{name}" for name in expected}


@pytest.mark.parametrize(
    ("dtypes", "casts", "expected"),
    [
        ([F32, BF16, BF16, BF16], Casts(), (BF16, False)),
        ([FP8, F32, BF16, BF16, BF16], Casts(), (BF16, False)),
        ([F32, F32, BF16], Casts(DtypePolicy(BF16), {"0", "1"}), (BF16, True)),
        ([F32, F32, BF16], Casts(DtypePolicy(BF16), {"0"}, {"1"}), (BF16, True)),
        ([F16, BF16, F16], Casts(DtypePolicy(BF16, only_narrow=True)), (BF16, False)),
        ([F32, F16, F16, F16], Casts(DtypePolicy(BF16), {"0", "1", "2", "3"}), (F16, False)),
        ([F32], Casts(DtypePolicy(BF16), {"0"}), (F32, False)),
        ([torch.int64, torch.bool, FP8], Casts(), (None, False)),
        ([], Casts(DtypePolicy(BF16)), (None, False)),
    ],
)
def test_the_dtype_of_a_model(dtypes, casts, expected):
    outputs = [TensorInfo(str(index), (4,), dtype) for index, dtype in enumerate(dtypes)]
    assert model_dtype(outputs, casts) == expected


def test_the_config_has_the_dtype_of_the_model_and_not_of_the_first_tensor(tmp_path):
    model = hf_model("llama")
    reports = [save_checkpoint(model, tmp_path / "live", dtype="bf16", keep_dtype="embed_tokens", fsync=False)]
    run = save(tmp_path / "run/step-1", model.state_dict())
    model.save_pretrained(tmp_path / "base")
    options: Any = {"base_model": tmp_path / "base", "dtype": "bf16", "keep_dtype": ["embed_tokens"], "fsync": False}
    reports += [export_checkpoint(run, tmp_path / "disk", **options)]
    assert "keep-dtype embed_tokens: 1 of 21 tensors" in reports[1].notes
    for report in reports:
        saved = load_file(report.path / "model.safetensors")
        assert [name for name, tensor in saved.items() if tensor.dtype != BF16] == ["model.embed_tokens.weight"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(report.path, dtype="auto")
        assert loaded.dtype == loaded.config.dtype == BF16


def test_a_part_that_was_cast_has_the_dtype_of_the_whole(tmp_path):
    """Parts that had a dtype of their own are cast with the rest."""
    packed = {"experts.weight": torch.ones(2, 2, dtype=torch.uint8)}
    tensors = {"language.weight": torch.randn(3, 2), "vision.weight": torch.randn(2, 2)}
    run = save(tmp_path / "run/step-1", {**tensors, **packed})
    quantized = {"quant_method": "mine", "weights": {"dtype": "float32"}}
    config = {"model_type": "mine", "dtype": "bfloat16", "vision_config": {"dtype": "float32"}}
    (tmp_path / "run/config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    for dtype, part in (("auto", "bfloat16"), ("float16", "float16")):
        export_checkpoint(run, tmp_path / dtype, dtype=dtype, fsync=False)
        written = json.loads((tmp_path / dtype / "config.json").read_text())
        assert written["dtype"] == written["vision_config"]["dtype"] == part
        assert written["quantization_config"] == quantized


HINT = (
    "weights are float32, as they are trained, and the config said bfloat16: dtype='bfloat16', or --dtype bfloat16, "
    "writes half the bytes"
)


def test_masters_are_not_written_in_silence(tmp_path):
    hf_model("llama").to(BF16).save_pretrained(tmp_path / "base")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=F32)
    configured: Any = hf_model("llama")
    configured.config.dtype = BF16
    run = save(tmp_path / "run/step-1", loaded.state_dict())

    def notes(model: nn.Module, **options: Any) -> list[str]:
        return list(save_checkpoint(model, tmp_path / "live", fsync=False, **options).notes)

    def stored(**options: Any) -> list[str]:
        folders: Any = {"base_model": tmp_path / "base", "fsync": False}
        return list(export_checkpoint(run, tmp_path / "disk", **folders, **options).notes)

    assert [note for note in notes(loaded) if note == HINT] == [HINT]
    assert json.loads((tmp_path / "live/config.json").read_text())["dtype"] == "float32"
    assert HINT in notes(configured)
    assert [note for note in stored() if note == HINT] == [HINT]
    quiet = [*notes(loaded, dtype="bf16"), *notes(loaded, dtype="fp32"), *notes(hf_model("llama"))]
    quiet += [*notes(hf_model("llama").to(BF16)), *stored(dtype="auto"), *stored(dtype="fp32")]
    assert [note for note in quiet if "writes half" in note] == []
    arguments = [run, "--base-model", tmp_path / "base", "--dtype", "keep", "--dry-run"]
    assert HINT in CliRunner().invoke(main, list(map(str, arguments))).stdout.splitlines()


class Fused(nn.Module):
    """What an adapter makes one tensor of, another two of halves of each row, one that it computes with or widens."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "halves", "scaled", "wide"):
            self.register_parameter(name, nn.Parameter(torch.randn(8, 4)))

    def to_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {"scaled": tensors["scaled"] * 3} if "scaled" in tensors else {}
        if "wide" in tensors:
            made |= {"wide": torch.cat([tensors["wide"].float()])}
        if "halves" in tensors:
            made |= dict(zip(("left", "right"), tensors["halves"].chunk(2, dim=1), strict=True))
        if {"q", "k", "v"} <= tensors.keys():
            qkv = torch.stack([tensors[name].view(2, 4, 4) for name in "qkv"], dim=1)
            made |= {"qkv": torch.cat([qkv.reshape(24, 4), tensors["q"].t().reshape(8, 4)])}
        return made


def test_a_cast_that_narrows_comes_before_the_gather_of_what_is_only_moved(monkeypatch):
    sent: list[int] = []

    def counted(output: torch.Tensor, shard_: torch.Tensor, *args: Any) -> None:
        sent.append(shard_.nbytes)
        all_gather_into(output, shard_, *args)

    monkeypatch.setattr(collectives, "all_gather_into", counted)

    def exported(make: Callable[[], Any], dtype: str) -> tuple[int, dict[str, torch.Tensor]]:
        sent.clear()
        torch.manual_seed(0)
        model = make()
        adapter = Fused() if isinstance(model, Fused) else None
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        tensors = dict(Exporter(model, dtype=dtype, adapter=adapter, bucket_bytes=1).tensors())
        return sum(sent), tensors

    def check() -> list[tuple[int, int]]:
        sizes = []
        for make in (Fused, partial(hub_model, "qwen3-moe")):
            (wide, whole), (narrow, cast) = (exported(make, dtype) for dtype in ("keep", "bf16"))
            assert_same(cast, {name: tensor.bfloat16() for name, tensor in whole.items()})
            sizes.append((wide, narrow))
        return sizes

    (fused, experts), *_ = run_ranks(check, 2)
    rows = 4 * 4 * 4  # bytes of a parameter's rows on a rank, in float32
    assert fused == (6 * rows, 4 * rows // 2 + 2 * rows)
    assert experts[0] == 2 * experts[1] > 0


def test_a_pattern_that_keeps_nothing_is_refused(mixed, tmp_path):
    message = "the pattern 'rooter' matches none of 9 tensors. Give whole segments of a name (embed_tokens) or a glob"
    with pytest.raises(UsageError) as caught:
        export_checkpoint(tmp_path / "run", tmp_path / "out", dtype="bf16", keep_dtype=["rooter"])
    assert str(caught.value).startswith(message)
    with pytest.raises(UsageError, match="the pattern 'upp' matches none of 12 tensors"):
        save_checkpoint(hf_model("gpt2").transformer.h[0], tmp_path / "out", keep_dtype=["upp"])
    assert not (tmp_path / "out").exists()
