"""What of the command line would have no effect, or is missing: refused before anything is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .errors import UsageError

if TYPE_CHECKING:
    from .checkpoint import OpenedCheckpoint

__all__ = ["OPENING", "check_combination", "check_effect", "given_options"]

OPENING = (
    *("base_model", "prefix", "dtype", "keep_dtype", "include", "exclude"),
    *("adapter", "trust_remote_code", "lora", "device"),
)
"""The options that say how a checkpoint is read."""


def given_options(context: click.Context) -> dict[str, str]:
    """Return what stands on the command line, and how it is spelled there."""
    spelled = {}
    for parameter in context.command.params:
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            is_negated = context.params[parameter.name] is False
            names = parameter.secondary_opts if is_negated else parameter.opts
            spelled[parameter.name] = max(names, key=len) if isinstance(parameter, click.Option) else "SOURCE"
    return spelled


def check_combination(given: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse what is missing and what would have no effect, as far as the options tell."""
    if options["demo"]:
        works = {"out", "overwrite", "smoke_test", "demo", "as_json", "quiet"}
        _refuse(given, given.keys() - works, "--demo")
    if options["compare"] is not None:
        _check_compare(given, options)
        return
    if options["dry_run"]:
        idle = {"device", "overwrite", "fsync", "verify", "smoke_test"} | (set() if options["as_json"] else {"quiet"})
        _refuse(given, idle, "--dry-run")
    if options["verify_only"]:
        idle = {"dry_run", "overwrite", "fsync", "max_shard_size", "verify", "smoke_test"}
        _refuse(given, idle, "--verify-only")
    if options["format_"] == "safetensors":
        _refuse(given, {"max_shard_size", "smoke_test"}, "--format safetensors")
    if options["dtype"] == "keep":
        _refuse(given, {"keep_dtype"}, "--dtype keep")
    if options["out"] is None and not options["dry_run"]:
        fix = "Give --out DIR; or --dry-run to see what would be written, or --demo --out DIR to try it"
        raise UsageError("no folder to write to", fix=fix)
    if str(options["out"]).startswith("-"):
        raise UsageError(
            "--out has no folder", found=options["out"], fix="For a folder of this name, give ./ before it"
        )
    if options["smoke_test"] is not None and not options["smoke_test"].strip():
        raise UsageError("--smoke-test has no text to continue", fix="Give the beginning of a sentence")


def _check_compare(given: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse what has no effect on a comparison."""
    works = {*OPENING, "compare", "as_json", "quiet"}
    _refuse(given, given.keys() - works, "--compare")
    if "dtype" not in given or options["dtype"] == "keep":
        _refuse(given, {"keep_dtype"}, "--compare that casts nothing")


def check_effect(checkpoint: OpenedCheckpoint, given: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse what has no effect on this checkpoint."""
    if options["format_"] == "safetensors" and not checkpoint.heeds_config:
        _refuse(given, {"base_model"}, "--format safetensors, where its config decides on no dtype and no tied weight")
    if not checkpoint.has_lora:
        _refuse(given, {"lora"}, "a checkpoint without LoRA")
    if checkpoint.is_lora:
        _refuse(given, {"max_shard_size", "smoke_test"}, "a LoRA adapter, which is one file that its base model loads")
    elif options["format_"] == "auto" and checkpoint.sidecars.config is None:
        _refuse(given, {"max_shard_size", "smoke_test"}, "one safetensors file, which it is without a config")


def _refuse(given: Mapping[str, str], idle: Iterable[str], cause: str) -> None:
    for name in given:
        if name in idle:
            raise UsageError(f"{given[name]} has no effect with {cause}", fix="Leave one of them out")
