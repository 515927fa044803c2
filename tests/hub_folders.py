"""Folders as they are on the hub: a config of transformers 4 by hand, a tokenizer, weights that nobody must copy."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = """{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": 16, "intermediate_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 2, "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_theta": 500000.0,
  "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
  "tie_word_embeddings": false,
  "torch_dtype": "float32",
  "transformers_version": "4.43.0",
  "vocab_size": 32
}
"""
GENERATION_CONFIG = (
    '{"bos_token_id": 1, "eos_token_id": [2, 3],\n "do_sample": true, "temperature": 0.6, "top_p": 0.9}\n'
)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": {"content": "<unk>", "lstrip": False, "normalized": False, "__type": "AddedToken"},
    "chat_template": TEMPLATE,
    "model_max_length": 64,
}

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
CONFIGS = ("config.json", "generation_config.json")
ALL_FILES = TOKENIZER_FILES.union(CONFIGS)

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "vocab.bin", "optimizer.pt")
# What tells loaders of weights that were quantized.
QUANTIZATION = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quant_log.csv")


def new_tokenizer() -> Any:
    """Return a byte-pair tokenizer of eight tokens, built in code."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "Ġ"]
    backend = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [("a", "b")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def write_hub_folder(folder: Path) -> Path:
    """Write a tiny Llama as the hub has them, with a tokenizer in the form of transformers 4."""
    folder.mkdir(parents=True)
    for name, content in _hub_files().items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _hub_files() -> dict[str, bytes]:
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(CONFIG)))
    return {
        "README.md": b"a model card",
        **dict.fromkeys(WEIGHTS, b"weights"),
        **dict.fromkeys(QUANTIZATION, b"{}"),
        "model.safetensors": save(model.state_dict(), metadata={"format": "pt"}),
        "config.json": CONFIG.encode(),
        "generation_config.json": GENERATION_CONFIG.encode(),
        "tokenizer.json": new_tokenizer().backend_tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG, indent=4).encode(),
        "special_tokens_map.json": b'{"bos_token":"<s>", "eos_token":"</s>", "unk_token":"<unk>"}',
    }


def put_into_hub_cache(folder: Path, cache: Path, model_id: str, commit: str = "0" * 40) -> Path:
    """Lay a folder out as the hub's cache does, with links to blobs, as the cached `main`; return the snapshot."""
    root = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for path in (root / "blobs", root / "refs", snapshot):
        path.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        blob = root / "blobs" / f"{commit[:4]}-{path.name}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return snapshot


def add_old_rope(file: Path) -> None:
    """Give a config that transformers 5 wrote the names of the plain angles that transformers 4 reads."""

    def add(part: dict[str, Any]) -> None:
        if "rope_parameters" in part:
            part |= {"rope_theta": part["rope_parameters"]["rope_theta"]}
            scaling = {key: value for key, value in part["rope_parameters"].items() if key != "rope_theta"}
            part["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
        for value in part.values():
            if isinstance(value, dict):
                add(value)

    config = json.loads(file.read_text())
    add(config)
    file.write_text(json.dumps(config, indent=2))
