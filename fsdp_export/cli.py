"""The command. It parses, calls the library, and turns errors into exit codes; torch is imported only to work."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import ExportError, UsageError

if TYPE_CHECKING:
    from .api import OpenedCheckpoint
    from .sinks.huggingface import Report

__all__ = ["main"]

_DTYPES = ("auto", "keep", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
_EPILOG = """\b
Examples:
  fsdp-export run/step-500 --out ckpt/ --base-model Qwen/Qwen2.5-7B
  fsdp-export --out ckpt/                    the newest checkpoint below this folder
  fsdp-export run/step-500 --dry-run         what is in it
  torchrun --nproc-per-node 8 -m fsdp_export run/step-500 --out ckpt/
  fsdp-export --demo --out ckpt/             trains a tiny model and exports it

\b
Exit codes: 0 done, 1 failed, 2 usage or nothing found, 3 a comparison differs, 130 interrupted.
"""


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="The folder to write.")
@click.option(
    "--base-model", "--model", metavar="MODEL", help="Where config, tokenizer and code come from: a folder or a hub id."
)
@click.option("--prefix", metavar="NAME.", help="Export what lies below this prefix. Default: found by itself.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", "hf", "safetensors"]),
    default="auto",
    show_default=True,
    help="hf: files, index, config, tokenizer. safetensors: one file. auto: hf if a config is found.",
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="auto",
    show_default=True,
    metavar="DTYPE",
    help="keep, bfloat16, float16, float32, or auto: the base config's dtype for tensors that are wider.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Bytes per file, decimal.  [default: 5GB]")
@click.option("--include", multiple=True, metavar="PATTERN", help="Export only these: whole segments, or a glob.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these out.")
@click.option("--device", metavar="DEVICE", help="Where tensors are converted.  [default: cpu]")
@click.option("--overwrite", is_flag=True, help="Replace weights in DIR that fsdp-export did not write.")
@click.option("--fsync/--no-fsync", default=None, help="Wait until the disk has the bytes.  [default: fsync]")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--smoke-test", metavar="PROMPT", help="Load the result with transformers and continue this text.")
@click.option("--demo", is_flag=True, help="Train a tiny model on two ranks, export it, and check the result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, everything else on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@click.version_option(__version__, "-V", "--version", prog_name="fsdp-export")
def main(**options: Any) -> None:
    """Export a sharded FSDP2 checkpoint as a Hugging Face or safetensors folder.

    SOURCE is a sharded checkpoint, or a folder above it, whose newest complete step is taken. Default: this folder.
    The old content of DIR stays until the new one is complete.
    """
    with _exit_codes():
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
        _check_combination(options)
        if options["demo"]:
            from .demo import run_demo

            run_demo(options["out"], prompt=options["smoke_test"], as_json=options["as_json"], quiet=options["quiet"])
        else:
            _export(**options)


def _export(
    *,
    source: Path | None,
    out: Path | None,
    base_model: str | None,
    prefix: str | None,
    format_: str,
    dtype: str,
    max_shard_size: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    device: str | None,
    overwrite: bool,
    fsync: bool | None,
    dry_run: bool,
    smoke_test: str | None,
    as_json: bool,
    quiet: bool,
    demo: bool,
) -> None:
    from .api import open_checkpoint
    from .launch import joined_group
    from .progress import Progress

    with joined_group() as (ranks, rank):
        is_lead = rank == ranks[0]
        say = _Speaker(to_stderr=as_json, quiet=quiet or not is_lead)
        checkpoint = open_checkpoint(
            source or Path.cwd(),
            base_model=base_model,
            prefix=prefix,
            dtype=dtype,
            include=include,
            exclude=exclude,
            device=device,
            ranks=ranks,
            rank=rank,
        )
        say(checkpoint.source.description)
        for note in checkpoint.notes:
            say(note)
        choices = {"format": format_, "max_shard_size": max_shard_size or "5GB"}
        if dry_run or out is None:
            _print_plan(checkpoint, as_json=as_json, is_lead=is_lead, **choices)
            return
        share = checkpoint.exporter.plan.num_bytes // len(ranks)
        with Progress(share, len(ranks), quiet=quiet or not is_lead) as progress:
            report = checkpoint.save(out, overwrite=overwrite, fsync=fsync is not False, delivered=progress, **choices)
    if is_lead:
        _finish(report, checkpoint, say, smoke_test=smoke_test, as_json=as_json)


class _Speaker:
    """Prints lines for people: on stdout, or on stderr where stdout belongs to JSON."""

    def __init__(self, *, to_stderr: bool, quiet: bool) -> None:
        self._to_stderr, self._quiet = to_stderr, quiet

    def __call__(self, line: str) -> None:
        if not self._quiet:
            click.echo(line, err=self._to_stderr)


def _finish(
    report: Report, checkpoint: OpenedCheckpoint, say: _Speaker, *, smoke_test: str | None, as_json: bool
) -> None:
    for line in report.lines():
        say(line)
    result = {"source": checkpoint.source.description, **report.as_json()}
    if smoke_test is not None:
        from .smoke import continue_text

        result["smoke_test"] = continue_text(report.path, smoke_test)
        say(f"transformers loads it and continues: {result['smoke_test']!r}")
    if as_json:
        click.echo(json.dumps(result))


def _print_plan(
    checkpoint: OpenedCheckpoint, *, as_json: bool, is_lead: bool, format: str, max_shard_size: str
) -> None:
    from .table import dtype_name, plan_table

    if not is_lead:
        return
    outputs, files = checkpoint.exporter.plan.outputs, checkpoint.files(format=format, max_shard_size=max_shard_size)
    if not as_json:
        click.echo(plan_table(outputs, files))
        return
    file_of = {name: file.name for file in files for name in file.offsets}
    tensors = [
        {
            "name": output.name,
            "shape": output.shape,
            "dtype": dtype_name(output.dtype),
            "bytes": output.num_bytes,
            "file": file_of[output.name],
        }
        for output in outputs
    ]
    click.echo(json.dumps({"source": checkpoint.source.description, "notes": checkpoint.notes, "tensors": tensors}))


def _check_combination(options: dict[str, Any]) -> None:
    """Refuse what is missing and what would have no effect."""
    if options["demo"]:
        _refuse_without_effect(options, "--demo", keep={"out", "demo", "as_json", "quiet", "smoke_test"})
    if options["dry_run"]:
        ignored = {"out", "overwrite", "fsync", "smoke_test", "quiet"}
        _refuse_without_effect(options, "--dry-run", keep=options.keys() - ignored | {"out"})
    elif options["out"] is None:
        raise UsageError("no folder to write to", fix="Give --out DIR, or --dry-run to see what would be written")
    if options["format_"] == "safetensors":
        _refuse_without_effect(options, "--format safetensors", keep=options.keys() - {"max_shard_size", "smoke_test"})


def _refuse_without_effect(options: dict[str, Any], cause: str, keep: set[str]) -> None:
    defaults = {"format_": "auto", "dtype": "auto"}
    for name, value in options.items():
        if name not in keep and value not in (None, False, (), defaults.get(name)):
            option = "SOURCE" if name == "source" else f"--{name.strip('_').replace('_', '-')}"
            raise UsageError(f"{option} has no effect with {cause}", fix="Leave one of them out")


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except ExportError as error:
        click.echo(f"fsdp-export: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("fsdp-export: interrupted; an earlier export is intact", err=True)
        sys.exit(130)
