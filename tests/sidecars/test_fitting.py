"""A config that is true to the weights, and what it declares that they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hf_folders import write
from hub_folders import CONFIG, write_hub_folder
from torch import nn

from fsdp_export import export_checkpoint, save_checkpoint
from fsdp_export.cli import main
from fsdp_export.sidecars.fitting import fit_config
from fsdp_export.sidecars.of_folder import from_folder
from fsdp_export.sidecars.sidecar import Sidecars
from fsdp_export.sinks.huggingface import Report


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


def _texts(sidecars: Sidecars) -> dict[str, str]:
    return {sidecar.name: sidecar.text() for sidecar in sidecars.files}


def test_a_config_is_fitted_to_the_weights_and_to_nothing_else(base: Path) -> None:
    config = CONFIG.replace("{", '{\n  "quantization_config": {"quant_method": "fp8"},', 1)
    (base / "config.json").write_text(config.replace("false", "true"))
    sidecars = from_folder(base)
    before = _texts(sidecars)
    fitted = fit_config(sidecars, dtype=torch.bfloat16, tied=False, quantized=False)
    assert _texts(fitted) == {**before, "config.json": CONFIG.replace("float32", "bfloat16")}
    assert fitted.config == json.loads(_texts(fitted)["config.json"])
    assert len(fitted.warnings) == 2
    assert _texts(sidecars) == before
    assert sidecars.warnings == []


def test_a_config_that_transformers_5_wrote_gets_the_angles_that_4_reads(base: Path) -> None:
    old = {key: value for key, value in json.loads(CONFIG).items() if not key.startswith("rope_")}
    config = {**old, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for given, expected in (({}, 5e5), ({"rope_theta": 1e4}, 1e4)):
        (base / "config.json").write_text(json.dumps({**config, **given}))
        fitted = json.loads(_texts(fit_config(from_folder(base), dtype=torch.float32))["config.json"])
        assert fitted == {**config, "rope_theta": expected, "rope_scaling": None}


def test_a_config_that_is_true_already_stays_a_copy(base: Path) -> None:
    sidecars = from_folder(base)
    assert fit_config(sidecars, dtype=torch.float32) == sidecars
    assert fit_config(sidecars, dtype=None) == sidecars
    assert fit_config(Sidecars(), dtype=torch.float16, tied=False) == Sidecars()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "disk"])
@pytest.mark.parametrize("where", ["", "text_config."])
def test_a_stale_quantization_is_dropped_and_a_true_one_stays(where: str, is_live: bool, tmp_path: Path) -> None:
    stale = {"quant_method": "fp8"}
    weights = {"w.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
    for name, tensors in (("plain", weights), ("packed", {**weights, "p.weight": torch.ones(2, 2).to(torch.uint8)})):
        config: dict[str, Any] = {"model_type": "mine", "text_config": {"a": 1}}
        (config["text_config"] if where else config)["quantization_config"] = stale
        report = _export(config, tensors, tmp_path / name, is_live=is_live)
        written = json.loads((tmp_path / name / "out/config.json").read_text())
        has_it = "quantization_config" in (written["text_config"] if where else written)
        note = f"{where}quantization_config was dropped: the weights are not quantized"
        assert (has_it, note in report.notes) == (name == "packed", name == "plain")


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "disk"])
@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        pytest.param(
            {"num_nextn_predict_layers": 1, "num_hidden_layers": 2},
            ["model.layers.0.w", "model.layers.1.w"],
            "config.json declares 1 draft layer (num_nextn_predict_layers), of which there is no tensor",
            id="deepseek",
        ),
        pytest.param(
            {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}, ["layers.1.w", "layers.2.w"], None, id="there"
        ),
        pytest.param(
            {"text_config": {"mtp_num_hidden_layers": 2, "num_hidden_layers": 2}},
            ["model.layers.1.w"],
            "config.json declares 2 draft layers (text_config.mtp_num_hidden_layers), of which there is no tensor",
            id="qwen3.5",
        ),
        pytest.param({"mtp_num_hidden_layers": 1}, ["mtp.fc.weight", "model.layers.1.w"], None, id="mtp-there"),
        pytest.param({"num_mtp_layers": 0}, ["model.layers.1.w"], None, id="none-declared"),
        pytest.param({"num_mtp_modules": "many", "num_nextn_predict_layers": True}, ["w"], None, id="nonsense"),
    ],
)
def test_draft_heads_that_are_declared_and_not_there_are_told(
    config: dict[str, Any], names: list[str], expected: str | None, is_live: bool, tmp_path: Path
) -> None:
    tensors = {name: torch.ones(2) for name in names}
    report = _export({"model_type": "mine", **config}, tensors, tmp_path, is_live=is_live)
    assert [note for note in report.notes if "declares" in note] == ([expected] if expected else [])


def test_a_dry_run_tells_what_the_export_would(tmp_path: Path) -> None:
    config = {"model_type": "mine", "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    write(tmp_path, {"model.safetensors": {"w.weight": torch.ones(2, 2)}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(main, [str(tmp_path), "--dry-run"])
    assert "quantization_config was dropped: the weights are not quantized" in result.stdout
    assert "config.json declares 1 draft layer" in result.stdout


class _Config:
    """A config that says what it was given."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def to_dict(self) -> dict[str, Any]:
        return self._content


def _export(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path, *, is_live: bool) -> Report:
    """Export tensors and their config from disk, or from a module that has them."""
    if not is_live:
        write(folder / "run", {"model.safetensors": tensors})
        (folder / "run/config.json").write_text(json.dumps(config))
        return export_checkpoint(folder / "run", folder / "out")
    module: Any = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        setattr(owner, last, nn.Parameter(tensor, requires_grad=False))
    module.config = _Config(config)
    return save_checkpoint(module, folder / "out")
