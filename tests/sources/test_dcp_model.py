import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import edit_metadata, put_together, save
from models import tiny
from refused.dcp import Runs
from stored_sources import assert_holds
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_export.errors import NotFoundError, UsageError
from fsdp_export.sources.dcp import DcpSource

FULL = torch.arange(40.0).view(8, 5)


class App(Stateful):
    """What the tutorial of DCP saves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randint(0, 11, (2, 3))).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda app: app.model.state_dict(), ""),
        (lambda app: app.state_dict(), "model."),
        (lambda app: {"app": app}, "app.model."),
        (
            lambda app: {"state": {"model": app.model.state_dict(), "optimizers": app.state_dict()["optim"]}},
            "state.model.",
        ),
        (lambda app: {**app.model.state_dict(), "optimizer": app.state_dict()["optim"], "step": 3}, ""),
        (lambda app: {"model": {f"module.{k}": v for k, v in app.model.state_dict().items()}}, "model."),
        (lambda app: {"model": {f"_orig_mod.{k}": v for k, v in app.model.state_dict().items()}}, "model."),
        (lambda app: {"policy": app.model.state_dict(), "train_state": {"step": torch.tensor(3)}}, "policy."),
        (lambda app: {"model": app.model.state_dict(), "ema": app.model.state_dict()}, "model."),
    ],
    ids=["flat", "nested", "stateful", "composer", "torchtitan", "ddp", "compiled", "other word", "ema"],
)
def test_the_model_is_found_and_nothing_else(wrap: Any, prefix: str, tmp_path: Path) -> None:
    app = App(tiny())
    source = DcpSource(save(tmp_path, wrap(app)))
    assert_holds(source, app.model.state_dict(), num_slices=0)
    assert (f"below {prefix.rstrip('.')!r}" in source.description) == bool(prefix)


LLAMA = {"model.embed_tokens.weight": FULL, "model.norm.weight": FULL[0]}
HEAD = {"lm_head.weight": FULL}


@pytest.mark.parametrize(
    ("state_dict", "names"),
    [
        (LLAMA, LLAMA),
        (LLAMA | HEAD, LLAMA | HEAD),
        ({"model": LLAMA}, LLAMA),
        ({"model": LLAMA | HEAD}, LLAMA | HEAD),
        ({"model": {"model": LLAMA}}, LLAMA),
        (LLAMA | {"optimizer": {"state": {"model.norm.weight": {"exp_avg": FULL}}}}, LLAMA),
    ],
    ids=["tied", "untied", "wrapped tied", "wrapped untied", "wrapped twice", "torchtitan tied"],
)
def test_names_that_begin_with_model_are_told_from_a_wrapper(
    state_dict: dict[str, Any], names: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert [spec.name for spec in DcpSource(save(tmp_path, state_dict)).specs] == list(names)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["model.model.norm.weight", "model.lm_head.weight"], ["model.norm.weight", "lm_head.weight"]),
        (["model.norm.weight", "lm_head.weight"], ["model.norm.weight", "lm_head.weight"]),
        (["layers.0.weight", "norm.weight"], ["layers.0.weight", "norm.weight"]),
        (["app.model.norm.weight", "app.optim.state.norm.weight.exp_avg"], ["norm.weight"]),
        (["state.model.norm.weight", "state.optimizers.AdamW.state.x", "epoch"], ["norm.weight"]),
        (["model.model.norm.weight", "optimizer.state.0.exp_avg", "lr_scheduler.last", "step"], ["model.norm.weight"]),
        (["module.norm.weight"], ["norm.weight"]),
        (["state_dict.norm.weight", "rng.cuda"], ["norm.weight"]),
        (["model.base_model.model.norm.weight"], ["base_model.model.norm.weight"]),
    ],
    ids=["wrapped", "head", "flat", "app", "state", "optimizer", "ddp", "state dict", "peft"],
)
def test_without_a_record_of_nesting_the_names_tell(keys: list[str], names: list[str], tmp_path: Path) -> None:
    put_together(tmp_path, dict.fromkeys(keys, FULL))
    edit_metadata(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    source = DcpSource(tmp_path)
    assert [spec.name for spec in source.specs] == names
    assert len(source.skipped) == len(keys) - len(names)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("actor.", ["w", "module.v"]),
        ("actor", ["w", "module.v"]),
        ("actor.module", ["v"]),
        ("", ["actor.w", "actor.module.v", "critic.w"]),
    ],
    ids=repr,
)
def test_a_given_prefix_counts(prefix: str, names: list[str], tmp_path: Path) -> None:
    save(tmp_path, {"actor": {"w": FULL, "module.v": FULL}, "critic": {"w": FULL}, "optim": {"w": {"exp_avg": FULL}}})
    assert [spec.name for spec in DcpSource(tmp_path, prefix=prefix).specs] == names


@pytest.mark.parametrize("prefix", ["teacher.", "optim."])
def test_a_prefix_without_tensors_is_refused(prefix: str, tmp_path: Path) -> None:
    save(tmp_path, {"actor": {"w": FULL}, "critic": {"w": FULL}, "optim": {"w": {"exp_avg": FULL}}})
    with pytest.raises(NotFoundError) as caught:
        DcpSource(tmp_path, prefix=prefix)
    assert str(caught.value) == (
        f"no tensor of a model below {prefix!r} in {tmp_path}: found 'actor.', 'critic.'."
        " Leave --prefix out, or give one of these."
    )


def of_lightning(folder: Path, module: dict[str, torch.Tensor]) -> Path:
    """Save as Lightning does: beside the tensors a pickle of anything, which must not be opened."""
    save(folder, {"model": module, "optimizer_0": {"state": {"w": {"exp_avg": FULL}}}})
    (folder / "meta.pt").write_bytes(pickle.dumps(Runs(folder / "ran")))
    return folder


@pytest.mark.parametrize(
    ("attribute", "prefix"),
    [("model.", "model.model"), ("net.", "model.net"), ("_orig_mod.net.", "model._orig_mod.net"), ("", "model")],
    ids=["model", "other word", "compiled", "none"],
)
@pytest.mark.parametrize("names", [LLAMA | HEAD, tiny().state_dict()], ids=["llama", "tiny"])
def test_the_model_is_found_in_an_attribute_of_a_lightning_module(
    attribute: str, prefix: str, names: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    source = DcpSource(of_lightning(tmp_path, {f"{attribute}{name}": tensor for name, tensor in names.items()}))
    assert_holds(source, names, num_slices=0)
    assert f"below {prefix!r}, 1 other entry left out" in source.description
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ({"model.embed_tokens.weight": FULL, "model.norm.weight": FULL[0]}, ["embed_tokens.weight", "norm.weight"]),
        ({"layer.weight": FULL, "layer.bias": FULL[0]}, ["layer.weight", "layer.bias"]),
        ({"encoder.layer.weight": FULL, "head.weight": FULL}, ["encoder.layer.weight", "head.weight"]),
    ],
    ids=["no head", "a layer", "attributes of a model"],
)
def test_what_a_lightning_module_has_is_told_from_what_it_is(
    module: dict[str, torch.Tensor], names: list[str], tmp_path: Path
) -> None:
    assert [spec.name for spec in DcpSource(of_lightning(tmp_path, module)).specs] == names


def test_a_lightning_module_with_several_models_has_several_prefixes(tmp_path: Path) -> None:
    llama = LLAMA | HEAD
    teacher = {f"teacher.{name}": tensor for name, tensor in llama.items()}
    of_lightning(tmp_path, {"loss.weight": FULL[0]} | {f"model.{name}": FULL for name in llama} | teacher)
    with pytest.raises(UsageError) as caught:
        DcpSource(tmp_path)
    assert str(caught.value) == (
        f"several prefixes that could be the model's in {tmp_path}: found 'model.', 'model.model.', 'model.teacher.'. "
        "Say which with --prefix; --prefix '' keeps the names as they are."
    )
    assert_holds(DcpSource(tmp_path, prefix="model.teacher"), llama, num_slices=0)


def test_a_composer_model_is_in_an_attribute_of_its_wrapper(tmp_path: Path) -> None:
    llama = LLAMA | HEAD
    module = {f"model.{name}": tensor for name, tensor in llama.items()}
    source = DcpSource(save(tmp_path, {"state": {"model": module, "timestamp": 3}, "rng": [FULL]}))
    assert_holds(source, llama, num_slices=0)
    assert "below 'state.model.model'" in source.description
