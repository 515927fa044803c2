"""Tiny checkpoints, and readers that must find one of two of them whole in a folder, or fail."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from publish_faults import Tree, tree
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from fsdp_export.publish import MARKER

OTHERS: Tree = {
    "notes.txt": b"mine",
    "optimizer.pt": b"state",
    "model.fp16.safetensors": b"",
    "sub": None,
    "sub/x": b"",
}
SIDECARS = ("chat_template.jinja", "tokenizer_config.json", "merges.txt")
INDEX = "model.safetensors.index.json"

Files = dict[str, bytes]


@dataclass(frozen=True)
class Checkpoint:
    """Files of a checkpoint and what each reader gets from it."""

    files: Files
    config: Qwen2Config
    loaded: tuple[float, str]
    backbone: str
    indexed: str

    @property
    def readings(self) -> set[Any]:
        return {self.loaded, self.backbone, self.indexed}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    parts = (name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def make_checkpoint(folder: Path, version: int, *, sharded: bool, sidecars: tuple[str, ...]) -> Checkpoint:
    torch.manual_seed(version)
    config = Qwen2Config(
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        rms_norm_eps=1e-6 * version,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="6KB" if sharded else "1GB")
    for name in sidecars:
        (folder / name).write_text(f"{name} of version {version}")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files[MARKER] = json.dumps({"version": version, "files": sorted([*files, MARKER])}).encode()
    weights = digest(model.state_dict())
    return Checkpoint(files, config, (config.rms_norm_eps, weights), digest(model.model.state_dict()), weights)


def from_pretrained(folder: Path) -> tuple[float, str] | None:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except Exception:  # noqa: BLE001
        return None
    return model.config.rms_norm_eps, digest(model.state_dict())


def backbone_with(config: Qwen2Config, folder: Path) -> str | None:
    """Load with no need of a `config.json`, which must not be the only thing that keeps mixtures out."""
    try:
        return digest(Qwen2Model.from_pretrained(folder, config=config).state_dict())
    except Exception:  # noqa: BLE001
        return None


def from_files(folder: Path) -> str | None:
    """Read what the index names, or else the single file."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        if (folder / INDEX).exists():
            names = json.loads((folder / INDEX).read_bytes())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                names = dict.fromkeys(file.keys(), "model.safetensors")
        for shard in set(names.values()):
            with safe_open(folder / shard, "pt") as file:
                assert set(file.keys()) == {name for name in names if names[name] == shard}
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return digest(tensors)


class Readers:
    """Check that a folder is old, new or loudly neither, once for every state that readers can see."""

    def __init__(self, folder: Path, old: Checkpoint, new: Checkpoint) -> None:
        self.folder, self.old, self.new = folder, old, new
        self.seen: dict[frozenset[tuple[str, bytes | None]], set[Any]] = {}

    def read(self) -> set[Any]:
        """Return what all readers get."""
        visible = {name: content for name, content in tree(self.folder).items() if not name.startswith(".fsdp-export")}
        assert {name: visible[name] for name in OTHERS} == OTHERS
        self.check_files(visible)
        key = frozenset(item for item in visible.items() if item[0] not in {*OTHERS, *SIDECARS, MARKER})
        if key not in self.seen:
            got = {from_pretrained(self.folder), from_files(self.folder), backbone_with(self.old.config, self.folder)}
            assert any(got <= {*one.readings, one.loaded[1], None} for one in (self.old, self.new))
            self.seen[key] = got
        return self.seen[key]

    def check_files(self, visible: Tree) -> None:
        ages = set()
        for name in visible.keys() - OTHERS.keys():
            is_old, is_new = (visible[name] == one.files.get(name) for one in (self.old, self.new))
            assert is_old or is_new, name
            ages |= {"old"} if not is_new else {"new"} if not is_old else set()
        assert len(ages) < 2, visible.keys()

    def is_exactly(self, checkpoint: Checkpoint) -> bool:
        """Tell whether the folder holds this checkpoint, the other files and nothing else."""
        return tree(self.folder) == {**OTHERS, **checkpoint.files} and self.read() == checkpoint.readings
