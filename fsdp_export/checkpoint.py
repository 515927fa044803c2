"""A checkpoint on disk that was opened: what it is, and what can be done with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from .errors import ComparisonError, SourceError, UsageError, listing
from .exporter import Exporter
from .fence import Fence
from .layout import FileLayout
from .paths import is_file
from .publish import files_replaced_by
from .rows import PlannedRows
from .sidecars.sidecar import Sidecars
from .sinks.compare import CompareSink
from .sinks.huggingface import ADAPTER_FILE, Report, fitted, folder_layouts, folder_sink
from .sinks.pairing import Tie
from .sinks.verify import VerifySink
from .sources.hf_folder import HfFolderSource
from .sources.stored import StoredSource
from .verification import Comparison, Verification
from .walk import Delivered

__all__ = ["OpenedCheckpoint"]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint on disk, ready to be exported.

    Attributes:
        source: What is read.
        exporter: What reads it.
        sidecars: The config, tokenizer and other files that were found for it.
        base_model: Where these were looked for first.
        heeds_config: Whether the config had a say in names or dtypes, which counts even where it is not written.
        notes: What was decided, a line each.
        is_lora: Whether it is exported as a LoRA adapter and no model.
        has_lora: Whether there is LoRA in it.
        lacks: Why there is no config for the adapter; None if there is one.
        declared_ties: Names that the config declares to be tied, whether they are there or not, each with that kept.
    """

    source: StoredSource
    exporter: Exporter
    sidecars: Sidecars
    base_model: str | None
    heeds_config: bool
    notes: list[str]
    is_lora: bool = False
    has_lora: bool = False
    lacks: SourceError | None = None
    declared_ties: Mapping[str, str] = field(default_factory=dict)

    def files(self, *, format: str = "auto", max_shard_size: int | str = "5GB") -> list[FileLayout]:  # noqa: A002
        """Return the files that `save` would write."""
        lay_out = folder_layouts(
            format,
            has_config=self.sidecars.config is not None,
            max_shard_size=max_shard_size,
            is_lora=self.is_lora,
        )
        self._refuse_to_lack_config(format)
        return lay_out(self.exporter.plan)

    def save(
        self,
        path: str | PathLike[str],
        *,
        format: str = "auto",  # noqa: A002  the name that users of this ecosystem expect
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        fsync: bool = True,
        delivered: Delivered = lambda _: None,
    ) -> Report:
        """Write the checkpoint folder; the arguments are those of `Exporter.save`. Collective."""
        folder = Path(path)
        layouts = self.files(format=format, max_shard_size=max_shard_size)
        sidecars = () if format == "safetensors" else (sidecar.name for sidecar in self.sidecars.files)
        self._refuse_to_replace_inputs(folder, [*(layout.name for layout in layouts), *sidecars])
        sink = folder_sink(
            folder,
            format=format,
            has_config=self.sidecars.config is not None,
            sidecars=lambda: self.sidecars,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            fsync=fsync,
            provenance=self._provenance,
            is_lora=self.is_lora,
        )
        started = time.perf_counter()
        self.exporter.send(sink, delivered=delivered)
        return sink.report(self.exporter.plan, time.perf_counter() - started)

    def verify(self, path: str | PathLike[str], *, delivered: Delivered = lambda _: None) -> Verification:
        """Read a folder that was written, and compare every tensor with the source, as `save` converts it. Collective.

        Nothing is held in memory but the rows that are compared. Before, the kernel is asked to forget what it keeps
        of the files, so that the disk is read.

        Args:
            path: The folder.
            delivered: Called with the bytes that this rank has just compared.

        Returns:
            What came of it, the same on every rank. A difference, or a folder that cannot be read, is no exception.

        Raises:
            ExportError: The source cannot be read on some rank; the same error is raised on all.
        """
        folder, started = Path(path), time.perf_counter()
        sink = VerifySink(folder, lambda: _written(folder, is_lora=self.is_lora))
        try:
            cards = self._send_to(sink, delivered)
        except ComparisonError as error:
            plan, seconds = self.exporter.plan, time.perf_counter() - started
            return Verification(folder, len(plan.outputs), plan.num_bytes, seconds, failure=str(error))
        return sink.verification(cards, time.perf_counter() - started, self.source.folder)

    def compare(self, other: OpenedCheckpoint, *, delivered: Delivered = lambda _: None) -> Comparison:
        """Compare every tensor with that of another checkpoint, both as `save` would convert them. Collective.

        Nothing is held in memory but the rows that are compared, and what a conversion needs whole.

        Args:
            other: The other checkpoint, opened for the same ranks.
            delivered: Called with the bytes that this rank has just compared.

        Returns:
            What came of it, the same on every rank. A difference is no exception.

        Raises:
            ExportError: One of the two cannot be read on some rank; the same error is raised on all.
        """
        started, plan = time.perf_counter(), other.exporter.plan
        names = {output.name for each in (self, other) for output in each.exporter.plan.outputs}
        ties = [tie for tie in dict.fromkeys([*_ties(self), *_ties(other)]) if not names.isdisjoint(tie)]
        one, two = _places(self.source, other.source)
        sink = CompareSink(two, lambda: PlannedRows(plan, other.source), ties)
        cards = self._send_to(sink, delivered)
        return sink.comparison(cards, time.perf_counter() - started, one)

    @property
    def fitted_sidecars(self) -> Sidecars:
        """The sidecars, with a config that is true to the tensors."""
        return fitted(self.sidecars, self.exporter.plan)

    def _send_to(self, sink: CompareSink, delivered: Delivered) -> list[str]:
        """Compare everything; return what each rank found."""
        self.exporter.send(sink, delivered=delivered)
        with Fence(self.source.ranks, self.source.rank).operation("comparing") as operation:
            return operation.agree(sink.card())

    def _provenance(self) -> dict[str, object]:
        facts, base = self.exporter.provenance(), self.sidecars.base_model
        if self.has_lora and "lora" not in facts:
            facts["lora"] = "adapter" if self.is_lora else "keep"
        return {**facts, "base_model": base.as_json()} if base is not None else facts

    def _refuse_to_lack_config(self, format: str) -> None:  # noqa: A002  as above
        if self.lacks is not None and format != "safetensors":
            raise self.lacks

    def _refuse_to_replace_inputs(self, folder: Path, names: Iterable[str]) -> None:
        """Keep the files that are read. A link in the folder is replaced itself, not what it points to."""
        here, fix = folder.resolve(), "Write into another folder"
        if self.base_model is not None and folder.is_dir() and here == Path(self.base_model).resolve():
            raise UsageError("the base model would be replaced", file=folder, fix=fix)
        sidecars = [sidecar.content for sidecar in self.sidecars.files if isinstance(sidecar.content, Path)]
        replaced = {here / name for name in files_replaced_by(folder, names)}
        read = (*sidecars, *self.source.data_files)
        lost = [path.name for path in read if {path.parent.resolve() / path.name, path.resolve()} & replaced]
        if lost:
            raise UsageError("files that are read would be replaced", file=folder, found=listing(lost), fix=fix)


def _written(folder: Path, *, is_lora: bool) -> HfFolderSource:
    """Open the files of an export, whatever else lies in the folder."""
    names = (ADAPTER_FILE,) if is_lora else ("model.safetensors.index.json", "model.safetensors")
    return HfFolderSource(next((folder / name for name in names if is_file(folder / name)), folder))


def _places(*sources: StoredSource) -> list[Path]:
    """Return the folders of checkpoints; where these are the same, the files that they are."""
    folders = [source.folder or Path() for source in sources]
    files = [list(source.data_files) for source in sources]
    is_told = len(set(folders)) == len(folders) or any(len(names) != 1 for names in files)
    return folders if is_told else [names[0] for names in files]


def _ties(checkpoint: OpenedCheckpoint) -> Iterator[Tie]:
    """Yield the names that are tied, as the config has it and as bytes that are stored once have it."""
    plan = checkpoint.exporter.plan
    yield from checkpoint.declared_ties.items()
    yield from plan.aliases
    names: dict[str, str] = {}
    for step in plan.steps:
        is_copy = len(step.inputs) == len(step.parts) == 1 and step.parts[0].inner is None
        if is_copy and step.inputs[0].num_bytes:
            names[step.inputs[0].name] = step.outputs[0].name
    for group in checkpoint.source.stored_once():
        kept, *others = [names[name] for name in group if name in names] or [""]
        yield from ((name, kept) for name in others)
