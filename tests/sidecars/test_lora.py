"""The config of an adapter: where it is found, what is edited in it, what is made where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_export.conversion.peft import LoraAdapter
from fsdp_export.sidecars.lora import ADAPTER_CONFIG, lora_sidecars
from fsdp_export.sidecars.sidecar import Origin, OriginKind, Sidecar, Sidecars

MODULES = ("model.layers.0.q_proj", "model.layers.1.q_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}
BASE = {"base_model_name_or_path": "me/base", "use_dora": False, "lora_bias": False}


def adapter(*saved: str, dora: bool = False, ranks: tuple[int, int] = (4, 4)) -> LoraAdapter:
    by_module = dict(zip(MODULES, ranks, strict=True))
    return LoraAdapter(by_module, saved, "none", has_magnitudes=dora, has_lora_bias=False)


def put(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))
    return path


def record(folder: Path, **values: Any) -> Path:
    return put(folder / "lora_train_meta.json", {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **values})


def config_of(sidecars: Sidecars) -> dict[str, Any]:
    (sidecar,) = (sidecar for sidecar in sidecars.files if sidecar.name == ADAPTER_CONFIG)
    content: dict[str, Any] = json.loads(sidecar.text())
    return content


@pytest.mark.parametrize("place", [".", "lora_adapter", "..", "../lora_adapter", "../../.."])
def test_a_config_that_says_all_is_copied_as_it_is(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "a/b/c"
    folder.mkdir(parents=True)
    path = put((folder / place).resolve() / ADAPTER_CONFIG, {**CONFIG, **BASE})
    sidecars = lora_sidecars(Sidecars(), adapter(), folder)
    kind: OriginKind = "parent" if place.startswith("..") else "source"
    origin = Origin(kind, path.parent, place if place != "." else "")
    assert sidecars.files == [Sidecar(ADAPTER_CONFIG, origin, path)]
    assert (sidecars.missing, sidecars.warnings) == ([], [])


def test_the_nearest_file_that_tells_lora_alpha_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run/step"
    put(folder.parent / ADAPTER_CONFIG, CONFIG)
    assert config_of(lora_sidecars(Sidecars(), adapter(), folder))["lora_alpha"] == 8
    record(folder)
    assert config_of(lora_sidecars(Sidecars(), adapter(), folder))["lora_alpha"] == 16
    put(folder / "lora_adapter" / ADAPTER_CONFIG, {**CONFIG, "lora_alpha": 2.5})
    assert config_of(lora_sidecars(Sidecars(), adapter(), folder))["lora_alpha"] == 2.5
    put(folder / ADAPTER_CONFIG, {**CONFIG, "lora_alpha": True})
    assert config_of(lora_sidecars(Sidecars(), adapter(), folder))["lora_alpha"] == 2.5


def test_only_what_the_tensors_prove_wrong_is_edited(tmp_path: Path) -> None:
    path = put(tmp_path / ADAPTER_CONFIG, {**CONFIG, **BASE, "bias": "none"})
    (sidecar,) = lora_sidecars(Sidecars(), adapter(dora=True), tmp_path).files
    assert sidecar.text() == path.read_text().replace('"use_dora": false', '"use_dora": true')


@pytest.mark.parametrize(
    ("named", "saved", "expected", "warned"),
    [
        (["lm_head"], ("lm_head",), ["lm_head"], ""),
        (["score"], ("model.score.dense", "model.score.out"), ["score"], ""),
        (["lm_head"], (), None, "lm_head"),
        (["lm_head", "score"], ("score",), ["score"], "lm_head"),
        (None, ("score",), ["score"], ""),
        (None, (), None, ""),
    ],
    ids=["as named", "inside of it", "not saved", "one of two", "not named", "none"],
)
def test_modules_to_save_are_those_that_were_saved(
    named: list[str] | None, saved: tuple[str, ...], expected: list[str] | None, warned: str, tmp_path: Path
) -> None:
    path = put(tmp_path / ADAPTER_CONFIG, {**CONFIG, **BASE, "modules_to_save": named})
    sidecars = lora_sidecars(Sidecars(), adapter(*saved), tmp_path)
    assert config_of(sidecars) == {**CONFIG, **BASE, "modules_to_save": expected}
    text = f"modules_to_save of {path} are not in the checkpoint: {warned}"
    assert sidecars.warnings == ([text] if warned else [])


@pytest.mark.parametrize(
    ("given", "written", "found", "expected"),
    [
        ("me/given", "me/written", "me/found", "me/given"),
        (None, "me/written", "me/found", "me/written"),
        (None, None, "me/found", "me/found"),
        (None, None, None, None),
    ],
)
def test_the_base_model_is_the_one_that_is_known(
    given: str | None, written: str | None, found: str | None, expected: str | None, tmp_path: Path
) -> None:
    base = Sidecars(config={"_name_or_path": found, "num_hidden_layers": 2})
    put(tmp_path / "one" / ADAPTER_CONFIG, {**CONFIG, "base_model_name_or_path": written})
    record(tmp_path / "other")
    for folder, known in (("one", expected), ("other", expected if written is None or given else found)):
        sidecars = lora_sidecars(base, adapter(), tmp_path / folder, given)
        assert config_of(sidecars)["base_model_name_or_path"] == known
        missing = [f"base_model_name_or_path in {ADAPTER_CONFIG}: --base-model gives it"]
        assert sidecars.missing == ([] if known else missing)


def test_a_config_is_made_of_the_tensors_and_what_verl_writes_down(tmp_path: Path) -> None:
    record(tmp_path, task_type="TaskType.SEQ_CLS")
    base = Sidecars(config={"num_hidden_layers": 2})
    sidecars = lora_sidecars(base, adapter("score", dora=True, ranks=(4, 2)), tmp_path)
    assert config_of(sidecars) == {
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 16,
        "lora_bias": False,
        "modules_to_save": ["score"],
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {r"model\.layers\.1\.q_proj": 2},
        "target_modules": ["q_proj"],
        "task_type": "SEQ_CLS",
        "use_dora": True,
    }
    record(tmp_path, r=0, task_type="anything")
    made = config_of(lora_sidecars(Sidecars(), adapter(ranks=(2, 2)), tmp_path))
    assert (made["r"], made["rank_pattern"], made["task_type"]) == (2, {}, None)
    assert made["target_modules"] == list(MODULES)


def test_the_tokenizer_stays_and_the_base_models_configs_do_not(tmp_path: Path) -> None:
    record(tmp_path)
    names = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
    missing = ["config.json: not in x", "generation_config.json: not in x", "tokenizer: none was found"]
    found = Sidecars(
        [Sidecar(name, Origin("source"), b"{}") for name in names], missing, ["a warning"], {"_name_or_path": "me/base"}
    )
    sidecars = lora_sidecars(found, adapter(), tmp_path)
    assert [sidecar.name for sidecar in sidecars.files] == [ADAPTER_CONFIG, "tokenizer.json", "chat_template.jinja"]
    assert sidecars.missing == ["tokenizer: none was found"]
    assert sidecars.warnings[0] == "a warning"
    assert sidecars.config is None
    assert len(found.files) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"r": [4], "rank_pattern": {"a": None, "b": 4}},
        {"r": 4, "rank_pattern": [1], "target_modules": 5},
        {"r": None, "target_parameters": ["experts.up"], "target_modules": ["x"]},
        {"modules_to_save": 3},
        {"target_modules": "(a+)+b"},
    ],
    ids=repr,
)
def test_odd_values_in_a_config_do_no_harm(values: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path / ADAPTER_CONFIG, {**CONFIG, **BASE, **values})
    assert config_of(lora_sidecars(Sidecars(), adapter(), tmp_path)).keys() >= CONFIG.keys()


def test_a_base_model_named_by_a_relative_path_gets_one_that_counts_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "run" / ADAPTER_CONFIG, {**CONFIG, "base_model_name_or_path": "./old"})
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    key = f"base_model_name_or_path in {ADAPTER_CONFIG}"
    for written, known, told in (
        ("base", str(tmp_path / "base"), f"{key} becomes {tmp_path / 'base'}; a hub id would mean the same on other"),
        (None, "./old", f"{key} is ./old, a relative path, which PEFT looks for where it is started"),
        ("me/base", "me/base", None),
        ("/not/here", "/not/here", None),
    ):
        sidecars = lora_sidecars(Sidecars(), adapter(), tmp_path / "run", written)
        assert config_of(sidecars)["base_model_name_or_path"] == known
        assert [warning.startswith(told or "") for warning in sidecars.warnings] == ([True] if told else [])
