"""The quickest proof that an export works: transformers loads it, and it goes on with a text."""

from __future__ import annotations

from pathlib import Path

from .errors import ComparisonError, UsageError

__all__ = ["continue_text"]

_NUM_NEW_TOKENS = 24


def continue_text(folder: Path, prompt: str) -> str:
    """Load a Hugging Face folder with transformers, on the CPU, and generate greedily.

    Args:
        folder: What was exported.
        prompt: The text to continue.

    Returns:
        The new text alone.

    Raises:
        UsageError: The folder has no tokenizer or no causal language model.
        ComparisonError: transformers reports missing or unexpected tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"transformers cannot load the export ({error})", file=folder) from error
    problems = {kind: names for kind in ("missing_keys", "unexpected_keys") if (names := info.get(kind))}
    if problems:
        raise ComparisonError("transformers misses or does not know tensors", file=folder, found=problems)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=_NUM_NEW_TOKENS, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
