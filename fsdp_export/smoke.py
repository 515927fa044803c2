"""The quickest proof that an export works: transformers loads it, and it goes on with a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ComparisonError, ExportError, listing

__all__ = ["continue_text"]

_NUM_NEW_TOKENS = 64


def continue_text(folder: Path, prompt: str, *, trust_remote_code: bool = False) -> str:
    """Load a Hugging Face folder with transformers, on the CPU, and generate greedily.

    Args:
        folder: What was exported.
        prompt: The text to continue.
        trust_remote_code: Whether code that comes with the model may be run.

    Returns:
        The new text alone, at most 64 tokens of it.

    Raises:
        ComparisonError: Tensors are missing or unexpected.
        ExportError: transformers cannot load the folder, or generate with it.
    """
    import torch
    import transformers
    from transformers.utils import logging

    untyped_logging: Any = logging
    untyped_logging.disable_progress_bar()
    model_class: Any = transformers.AutoModelForCausalLM
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model, info = model_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever its many classes raise
        raise _failure("transformers cannot load the export", folder, error) from error
    for kind in ("missing_keys", "unexpected_keys"):
        if info.get(kind):
            what = f"transformers reports {kind.replace('_keys', '')} tensors"
            raise ComparisonError(what, file=folder, found=listing(info[kind]), fix="Give the right --base-model")
    try:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=_NUM_NEW_TOKENS, do_sample=False)
    except Exception as error:  # as above
        raise _failure("transformers cannot generate with the export", folder, error) from error
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _failure(what: str, folder: Path, error: Exception) -> ExportError:
    reason = str(error).strip().partition("\n")[0].removesuffix(".") or type(error).__name__
    return ExportError(what, file=folder, found=reason, fix="The folder is complete; only this test of it failed")
