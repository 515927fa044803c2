"""A training run small enough to carry along: what `--demo` trains, exports twice, and checks."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from .api import export_checkpoint, save_checkpoint
from .errors import ComparisonError, ExportError, UsageError
from .smoke import continue_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["run_demo"]

_NUM_RANKS = 2
_NUM_STEPS = 60
_PROMPT = "A shard is"
_TEXT = """A shard is a row of rows that one rank keeps while the others keep the rest.
A walk takes one bucket at a time and leaves the model where it stands.
A file has one place for every row, so every rank writes its own.
A reader finds the old weights or the new ones, and never half of each.
"""


def run_demo(out: Path | None, *, prompt: str | None, as_json: bool, quiet: bool) -> None:
    """Train, export from disk and from the live ranks, compare, load, generate.

    Args:
        out: The folder to write.
        prompt: What the exported model is to continue; default: a text that it has learned.
        as_json: Whether stdout is for JSON alone.
        quiet: Whether to print nothing.

    Raises:
        ComparisonError: The two exports, or what transformers loads, differ.
    """
    if out is None:
        raise UsageError("no folder to write to", fix="Give --out DIR")
    prompt = prompt or _PROMPT

    def say(line: str) -> None:
        if not quiet:
            click.echo(line, err=as_json)

    with tempfile.TemporaryDirectory(prefix="fsdp-export-demo-") as temporary:
        run = Path(temporary)
        started = time.perf_counter()
        first_loss, last_loss = _train(run)
        say(
            f"Trained a tiny Qwen2 for {_NUM_STEPS} steps on {_NUM_RANKS} ranks, FSDP2 with CPU offload, in"
            f" {time.perf_counter() - started:.1f} s: loss {first_loss:.2f} -> {last_loss:.2f}."
        )
        report = export_checkpoint(run, out)
        say(f"Exported its sharded checkpoint: {report.headline()}.")
        num_tensors = _compare(out, run / "live")
        say(f"Exported the live model from its ranks as well: all {num_tensors} tensors are equal, bit for bit.")
        continued = continue_text(out, prompt)
        say(f"transformers loads {out} and continues {prompt!r}: {continued!r}")
    if as_json:
        result = {"loss": [first_loss, last_loss], "equal_tensors": num_tensors, "smoke_test": continued}
        click.echo(json.dumps({**report.as_json(), **result}))


def _train(run: Path) -> tuple[float, float]:
    """Train on forked ranks, which save their shards and export what they hold; return the first and last loss."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    losses = context.SimpleQueue()
    ranks = [context.Process(target=_train_rank, args=(rank, run, losses)) for rank in range(_NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks) or losses.empty():
        raise ExportError("the training ranks of the demo failed", fix="Their messages are above")
    first, last = losses.get()
    return first, last


def _train_rank(rank: int, run: Path, losses: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run}/rendezvous", rank=rank, world_size=_NUM_RANKS)
    try:
        tokenizer = _make_tokenizer()
        model = _make_model(tokenizer)
        mesh = init_device_mesh("cpu", (_NUM_RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        first, last = _fit(model, tokenizer, rank)
        folder = run / f"step-{_NUM_STEPS}"
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        if rank == 0:
            model.config.save_pretrained(run)
            tokenizer.save_pretrained(run)
            losses.put((first, last))
        save_checkpoint(model, run / "live", tokenizer=tokenizer)
    finally:
        dist.destroy_process_group()


def _fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rank: int) -> tuple[float, float]:
    lines = _TEXT.splitlines(keepends=True)[rank::_NUM_RANKS]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(_NUM_STEPS):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def _make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {character: index for index, character in enumerate(["<pad>", "<unk>", *sorted(set(_TEXT))])}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


def _make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def _compare(one: Path, other: Path) -> int:
    """Compare two folders tensor by tensor, and what transformers makes of the first; return how many there are."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(one).state_dict()
    with (
        safe_open(one / "model.safetensors", "pt") as ours,
        safe_open(other / "model.safetensors", "pt") as theirs,
    ):
        names = set(ours.keys())
        if names != set(theirs.keys()):
            raise ComparisonError("the two exports have different tensors", found=names ^ set(theirs.keys()))
        for name in sorted(names):
            tensor = ours.get_tensor(name)
            if not torch.equal(tensor, theirs.get_tensor(name)) or not torch.equal(tensor, loaded[name]):
                raise ComparisonError("different values", name=name, file=one)
    return len(names)
