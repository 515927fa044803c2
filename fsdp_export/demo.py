"""A training run small enough to carry along: what `--demo` trains, exports twice, and checks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from .api import export_checkpoint, save_checkpoint
from .errors import ComparisonError, ExportError, listing
from .smoke import continue_text

__all__ = ["run_demo"]

_NUM_RANKS = 2
_NUM_STEPS = 50
_NUM_WARMUP_STEPS = 10
_PROMPT = "A shard is"
_END = "<|endoftext|>"
_TEXT = """A shard is the rows that one rank keeps while others keep the rest.
A walk takes one bucket at a time and leaves the model where it stands.
A file has one place for every row, so that every rank writes its own.
A reader finds the old weights or the new ones, and never half of each.
"""


def run_demo(out: Path, *, prompt: str | None, overwrite: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Train, export from disk and from the live ranks, compare, load, generate.

    Args:
        out: The folder to write.
        prompt: What the exported model is to continue; default: the beginning of a sentence that it has learned.
        overwrite: Whether weights in the folder that we did not write may be replaced.
        say: Prints a line.

    Returns:
        What was done, as JSON values.

    Raises:
        ComparisonError: The two exports, or what transformers loads, differ.
        ExportError: The training failed, or an export did.
    """
    prompt = prompt or _PROMPT
    untyped_logging: Any = logging
    untyped_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="fsdp-export-demo-") as temporary, warnings.catch_warnings():
        # Of torch and transformers, about each other.
        warnings.simplefilter("ignore")
        run = Path(temporary)
        started = time.perf_counter()
        first_loss, last_loss = _train(run)
        seconds = time.perf_counter() - started
        say(f"trained {_NUM_STEPS} steps in {seconds:.1f} s, loss {first_loss:.2f} -> {last_loss:.2f}")
        report = export_checkpoint(run, out, overwrite=overwrite)
        say(f"exported its sharded DCP checkpoint: {report.headline()}")
        num_tensors = _compare(out, run / "live")
        say(f"exported the live model from its ranks too: all {num_tensors} tensors are equal, bit for bit")
        continued = continue_text(out, prompt)
        say(f"loaded {out} with transformers, which makes of {prompt!r}:\n\n    {prompt}{continued}\n")
    return {
        **report.as_json(),
        "steps": _NUM_STEPS,
        "loss": [first_loss, last_loss],
        "equal_tensors": num_tensors,
        "smoke_test": continued,
    }


def _train(run: Path) -> tuple[float, float]:
    """Train on forked ranks, which save their shards and export what they hold; return the first and last loss."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    losses = context.SimpleQueue()
    ranks = [context.Process(target=_train_rank, args=(rank, run, losses)) for rank in range(_NUM_RANKS)]
    try:
        _start_deaf(ranks)
        for process in ranks:
            process.join()
    finally:
        alive = [process for process in ranks if process.is_alive()]
        for process in alive:  # all before one is waited for, or the others would tell of its death
            process.kill()
        for process in alive:
            process.join()
    if any(process.exitcode for process in ranks):
        raise ExportError("the training of the demo failed", fix="The messages of its ranks are above")
    first, last = losses.get()
    return first, last


def _start_deaf(processes: Sequence[BaseProcess]) -> None:
    """Start processes that no interrupt reaches: it is for this one, which ends them."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _train_rank(rank: int, run: Path, losses: Any) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # The name of a host need not resolve to an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{run}/rendezvous", rank=rank, world_size=_NUM_RANKS)
    try:
        tokenizer = _make_tokenizer()
        model = _make_model(tokenizer)
        mesh = init_device_mesh("cpu", (_NUM_RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        first, last = _fit(model, tokenizer, rank)
        save_dcp({"model": model.state_dict()}, checkpoint_id=run / f"step-{_NUM_STEPS}")
        if rank == 0:
            model.config.save_pretrained(run)
            model.generation_config.save_pretrained(run)
            tokenizer.save_pretrained(run)
            losses.put((first, last))
        save_checkpoint(model, run / "live", tokenizer=tokenizer)
    finally:
        dist.destroy_process_group()


def _fit(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rank: int) -> tuple[float, float]:
    lines = [line + _END for line in _TEXT.splitlines()[rank::_NUM_RANKS]]
    batch = tokenizer(lines, return_tensors="pt", padding=True, padding_side="right")
    tokens = batch["input_ids"]
    # The first of the paddings is the end that was written.
    labels = tokens.masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _NUM_WARMUP_STEPS, total_iters=_NUM_WARMUP_STEPS)
    losses = []
    for _ in range(_NUM_STEPS):
        loss = model(input_ids=tokens, attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes, which stays the same in whatever class transformers loads it for a Qwen2."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [_END, *sorted(byte_level.alphabet())]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    wrapped: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = wrapped(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)
    return fast


def _make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def _compare(one: Path, other: Path) -> int:
    """Compare two folders tensor by tensor, and what transformers makes of the first; return how many there are."""
    loaded = AutoModelForCausalLM.from_pretrained(one).state_dict()
    with safe_open(one / "model.safetensors", "pt") as ours, safe_open(other / "model.safetensors", "pt") as theirs:
        names, their_names = set(ours.keys()), set(theirs.keys())
        if names != their_names:
            raise ComparisonError("the two exports have different tensors", found=listing(names ^ their_names))
        for name in sorted(names):
            tensor = ours.get_tensor(name)
            if not torch.equal(tensor, theirs.get_tensor(name)) or not torch.equal(tensor, loaded[name]):
                raise ComparisonError("different values", name=name, file=one)
    return len(names)
