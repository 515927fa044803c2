"""The command. It parses, calls the library, and turns errors into exit codes; torch is imported only to work."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .cli_checks import OPENING, check_combination, check_effect, given_options
from .console import exit_codes, leave, logged, quiet_libraries, stdout_kept_for_json
from .errors import ComparisonError, UsageError
from .launch import Group, joined_group, launched_ranks, speaks
from .sizes import is_size

if TYPE_CHECKING:
    from .checkpoint import OpenedCheckpoint
    from .progress import Progress
    from .sidecars.sidecar import Sidecars
    from .sinks.huggingface import Report
    from .sources.stored import StoredSource

__all__ = ["main"]

_DTYPES = ("auto", "keep", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
_EPILOG = """\b
Examples:
  fsdp-export run/step-500 --out ckpt/ --base-model Qwen/Qwen2.5-7B
  fsdp-export --out ckpt/                    the newest one below this folder
  fsdp-export run/step-500 --dry-run         what is in it
  fsdp-export --compare run/step-500 ckpt/   names, shapes, dtypes, values
  torchrun --nproc-per-node 8 -m fsdp_export run/step-500 --out ckpt/
  fsdp-export --demo --out ckpt/             train a tiny model, export it

\b
Exit codes: 0 done, 1 failed, 2 usage or nothing found,
3 a comparison differs, 130 interrupted.
"""


class _Command(click.Command):
    """Says what is wrong with its arguments once, and not on every rank."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, or leave with a message or, on a rank that does not speak, without one."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if speaks(os.environ):
                raise
            leave("", error.exit_code, may_speak=False)


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A number of bytes as the library takes it."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return plain digits as a number, and anything else as the text that it is."""
        if not is_size(value):
            self.fail(f"{value!r} is no size: give bytes, or a number with KB, MB, GB or TB (decimal).", param, ctx)
        return int(value) if value.isdecimal() else value


@click.command(
    cls=_Command, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
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
    help="keep, bfloat16, float16, float32, or auto: the config's dtype for tensors that are wider.",
)
@click.option(
    "--keep-dtype",
    multiple=True,
    metavar="PATTERN",
    help="Do not cast these: whole segments of a name, or a glob. Repeatable.",
)
@click.option("--max-shard-size", type=_Size(), metavar="SIZE", help="Bytes per file, decimal.  [default: 5GB]")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Export only these: whole segments, or a glob. Repeatable."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these out. Repeatable.")
@click.option(
    "--adapter", metavar="MODULE:NAME", help="Converts names and tensors to Hugging Face's: torchtitan's, say."
)
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the config names, to learn its names.")
@click.option(
    "--lora",
    type=click.Choice(["auto", "merge", "adapter", "keep"]),
    default="auto",
    show_default=True,
    help="Of a PEFT model: merge LoRA into the weights, the adapter alone, or all as it is. auto: merge where it can.",
)
@click.option("--device", metavar="DEVICE", help="Where tensors are converted.  [default: cpu]")
@click.option("--overwrite", is_flag=True, help="Replace weights in DIR that fsdp-export did not write.")
@click.option("--fsync/--no-fsync", default=True, help="Wait until the disk has the bytes.  [default: fsync]")
@click.option("--verify", is_flag=True, help="Read back what was written, and compare every tensor with SOURCE.")
@click.option("--verify-only", is_flag=True, help="Write nothing: compare what DIR has with SOURCE, as --verify does.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A B",
    help="Compare two checkpoints, each as an export would name and convert it; exit code 3 if they differ.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--smoke-test", metavar="PROMPT", help="Load the result with transformers and continue this text.")
@click.option("--demo", is_flag=True, help="Train a tiny model on two ranks, export it, and check the result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, everything else on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@click.version_option(__version__, "-V", "--version", prog_name="fsdp-export")
def main(**options: Any) -> None:
    """Export a sharded FSDP2 checkpoint as a Hugging Face or safetensors folder, or compare two.

    SOURCE is a sharded checkpoint, or a folder above it, whose newest complete step is taken. Default: this folder.
    The old content of DIR stays until the new one is complete.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    is_speaker = speaks(os.environ)
    quiet_libraries(silent=options["quiet"] or not is_speaker)
    with exit_codes(lambda: is_speaker), logged(enabled=is_speaker):
        given = given_options(click.get_current_context())
        check_combination(given, options)
        with stdout_kept_for_json() if options["as_json"] else nullcontext():
            result = _run(options, given)
        if options["as_json"] and result is not None:
            click.echo(json.dumps(result))
        errors = (result[key]["error"] for key in ("verified", "compared") if result is not None and key in result)
        if (error := next(errors, None)) is not None:
            raise ComparisonError(error)


def _run(options: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any] | None:
    """Do it; return what `--json` prints, on the rank that prints."""
    if options["demo"]:
        return _run_demo(options)
    with joined_group() as group, exit_codes(lambda: group.is_first_to("speak of an error")):
        do = _compare if options["compare"] is not None else _export
        return do(options, given, group)


def _run_demo(options: Mapping[str, Any]) -> dict[str, Any]:
    if launched_ranks(os.environ) is not None:
        raise UsageError("--demo starts its ranks itself", fix="Run it without a launcher")
    say = _speaker(options, is_lead=True)
    say("training a tiny Qwen2 with FSDP2 and CPUOffloadPolicy on two ranks ...")
    from .demo import run_demo

    return run_demo(options["out"], prompt=options["smoke_test"], overwrite=options["overwrite"], say=say)


def _export(options: Mapping[str, Any], given: Mapping[str, str], group: Group) -> dict[str, Any] | None:
    from .opening import open_checkpoint

    say = _speaker(options, is_lead=group.is_lead)
    checkpoint = open_checkpoint(
        options["source"] or Path.cwd(),
        ranks=group.ranks,
        rank=group.rank,
        format=options["format_"],
        **{name: options[name] for name in OPENING},
    )
    say(_found(checkpoint.source))
    check_effect(checkpoint, given, options)
    writes_sidecars = options["format_"] != "safetensors"
    for note in (*(_origins(checkpoint.sidecars) if writes_sidecars else ()), *checkpoint.notes):
        say(note)
    choices = {"format": options["format_"], "max_shard_size": options["max_shard_size"] or "5GB"}
    if options["dry_run"]:
        return _show_plan(checkpoint, say, choices) if group.is_lead else None
    report, verification = None, None
    if not options["verify_only"]:
        with _progress(checkpoint, options, group) as progress:
            report = checkpoint.save(
                options["out"],
                overwrite=options["overwrite"],
                fsync=options["fsync"],
                delivered=progress,
                **choices,
            )
    if options["verify"] or options["verify_only"]:
        with _progress(checkpoint, options, group, "verifying") as progress:
            verification = checkpoint.verify(options["out"], delivered=progress)
    if not group.is_lead:
        return None
    if report is not None:
        return _finish(checkpoint, replace(report, verification=verification), say, options)
    assert verification is not None
    for line in verification.lines():
        say(line)
    return {**_json_of_source(checkpoint), "notes": checkpoint.notes, "verified": verification.as_json()}


def _compare(options: Mapping[str, Any], given: Mapping[str, str], group: Group) -> dict[str, Any] | None:
    from .comparing import open_two

    say = _speaker(options, is_lead=group.is_lead)
    chosen = {name: options[name] for name in OPENING}
    if "dtype" not in given:  # what narrows both would hide how they differ
        chosen["dtype"] = "keep"
    both = open_two(*options["compare"], ranks=group.ranks, rank=group.rank, **chosen)
    for checkpoint in both:
        for line in (_found(checkpoint.source), *checkpoint.notes):
            say(line)
    with _progress(both[0], options, group, "comparing") as progress:
        comparison = both[0].compare(both[1], delivered=progress)
    if not group.is_lead:
        return None
    for line in comparison.lines():
        say(line)
    sources = [{**_json_of_source(checkpoint), "notes": checkpoint.notes} for checkpoint in both]
    return {"checkpoints": sources, "compared": comparison.as_json()}


def _progress(
    checkpoint: OpenedCheckpoint, options: Mapping[str, Any], group: Group, doing: str | None = None
) -> Progress:
    """Return what shows how far an export is, or a comparison, which ends with the slowest rank and not the disk."""
    from .progress import Progress

    words = {} if doing is None else {"doing": doing, "then": "waiting for the other ranks"}
    quiet = options["quiet"] or not group.is_lead
    return Progress(checkpoint.exporter.plan.num_bytes, len(group.ranks), quiet=quiet, **words)


def _finish(
    checkpoint: OpenedCheckpoint, report: Report, say: Callable[[str], None], options: Mapping[str, Any]
) -> dict[str, Any]:
    for line in report.lines():
        say(line)
    result = {**_json_of_source(checkpoint), **report.as_json()}
    result["notes"] = [*checkpoint.notes, *report.notes]
    prompt = options["smoke_test"]
    if prompt is not None and (report.verification is None or report.verification.is_equal):
        from .smoke import continue_text

        result["smoke_test"] = continue_text(report.path, prompt, trust_remote_code=options["trust_remote_code"])
        say(f"transformers loads it and continues {prompt!r}: {result['smoke_test']!r}")
    return result


def _show_plan(checkpoint: OpenedCheckpoint, say: Callable[[str], None], choices: dict[str, Any]) -> dict[str, Any]:
    from .table import dtype_name, plan_table

    outputs, files = checkpoint.exporter.plan.outputs, checkpoint.files(**choices)
    sidecars = checkpoint.fitted_sidecars
    lacks = [*sidecars.warnings, *(f"not written: {what}" for what in sidecars.missing)]
    missing = lacks if choices["format"] != "safetensors" else []
    for note in missing:
        say(note)
    say(plan_table(outputs, files))
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
    sizes = {file.name: file.num_bytes for file in files}
    notes = [*checkpoint.notes, *missing]
    return {**_json_of_source(checkpoint), "notes": notes, "files": sizes, "tensors": tensors}


def _json_of_source(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {"source": str(checkpoint.source.folder), "found": checkpoint.source.description}


def _origins(sidecars: Sidecars) -> Iterator[str]:
    """Yield which files were found where."""
    places: dict[Path, list[str]] = {}
    for sidecar in sidecars.files:
        if isinstance(sidecar.content, Path):
            depth = len(Path(sidecar.name).parts)
            places.setdefault(sidecar.content.parents[depth - 1], []).append(sidecar.name)
    for place, names in places.items():
        yield f"from {_short(place)}: {', '.join(names)}"


def _found(source: StoredSource) -> str:
    others = f" of {source.num_found:,} checkpoints below" if source.num_found > 1 else ""
    return f"found {_short(source.folder)}{others}: {source.description}"


def _short(path: Path | None) -> str:
    """Return a path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path is not None and here in path.parents else path)


def _speaker(options: Mapping[str, Any], *, is_lead: bool) -> Callable[[str], None]:
    """Return what prints lines for people: on stdout, or on stderr where stdout belongs to JSON."""

    def say(line: str) -> None:
        # Whoever read these lines may be gone; the export goes on.
        with suppress(OSError):
            if is_lead and not options["quiet"]:
                click.echo(line, err=options["as_json"])

    return say
