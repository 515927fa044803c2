"""LoRA adapters on a tiny Llama, made by PEFT, and saved sharded as trainers do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from models import hf_model, shard
from peft import LoraConfig
from rank_folders import save_as_verl
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_export import export_checkpoint
from fsdp_export.errors import ExportError

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"},
    "ranks": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["k_proj", "up_proj", "embed_tokens"],
        "rank_pattern": {"up_proj": 2, "layers.1.self_attn.k_proj": 6},
    },
    "dora": {"r": 2, "lora_alpha": 7, "target_modules": r".*layers\.1\..*_proj", "use_dora": True},
    "saved": {
        "r": 2,
        "lora_alpha": 7,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
        "lora_bias": True,
    },
}


def peft_model(kind: str, adapter: str = "default") -> Any:
    """Return a model with an adapter that changes what it says, the same at every call."""
    with _peft_on_new_transformers():
        base: Any = hf_model("llama")
        model: Any = peft.get_peft_model(base, LoraConfig(**KINDS[kind]), adapter_name=adapter)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.rand(parameter.shape, generator=draw) * 0.3 + 0.05)
    return model.eval()


@contextmanager
def _peft_on_new_transformers() -> Iterator[None]:
    """Let it use what transformers is about to rename, and give layers biases that they do not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed", UserWarning)
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6)).logits


def load(folder: Path) -> Any:
    """Load an adapter with PEFT; what is missing in it, or too much, is an error."""
    with _peft_on_new_transformers():
        base: Any = hf_model("llama")
        return peft.PeftModel.from_pretrained(base, str(folder)).eval()


def on_disk(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the state dict that PEFT saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves embeddings that are trained
        return peft.get_peft_model_state_dict(model, adapter_name=adapter)


def record(folder: Path, model: Any, **changes: Any) -> None:
    """Write down what verl does of an adapter."""
    config = model.peft_config["default"]
    content = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": config.task_type or "CAUSAL_LM", **changes}
    (folder / "lora_train_meta.json").write_text(json.dumps(content, indent=4))


def save_as_verl_does(folder: Path, model: Any) -> None:
    """Save with `save_lora_only`: its manager's state dict, filter and record. Collective."""
    kept = {key: value for key, value in model.state_dict().items() if "lora_" in key or ".adapter_" in key}
    only: Any = SimpleNamespace(state_dict=lambda: kept)
    save_as_verl(folder, only)
    if dist.get_rank() == 0:
        record(folder, model)


def save_in_every_layout(folder: Path, kind: str) -> None:
    """Shard a model with an adapter and save the adapter: verl, a sharded and a full state dict of accelerate."""
    import torch.distributed.checkpoint as dcp

    model = shard(peft_model(kind), "1d", dist.get_world_size())
    if kind != "saved":  # verl does not save the other modules
        save_as_verl_does(folder / "verl/global_step_3/actor", model)
    dcp.save({"model": on_disk(model)}, checkpoint_id=folder / "sharded/checkpoint-3/pytorch_model_fsdp_0")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        (folder / "full/checkpoint-3").mkdir(parents=True)
        torch.save(full, folder / "full/checkpoint-3/pytorch_model_fsdp.bin")


def assert_refused(folder: Path, error: type[ExportError], message: str) -> None:
    """Export the checkpoint in a folder in vain; the message has `{folder}` in the place of its path."""
    with pytest.raises(ExportError) as caught:
        export_checkpoint(folder / "pytorch_model_fsdp.bin", folder / "out")
    assert str(caught.value).replace(str(folder), "{folder}") == message
    assert type(caught.value) is error
    assert not (folder / "out").exists()
