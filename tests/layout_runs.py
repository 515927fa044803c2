"""Runs as trainers leave them on disk: saved by the real libraries on several ranks, and exported by the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from exports import assert_same
from models import hf_model, shard, tiny
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from fsdp_export.cli import main

Maker = Callable[[], nn.Module]

MESHES = [(2, "1d"), (4, "hsdp"), (4, "tp")]
MODELS: dict[str, Maker] = {"llama": lambda: hf_model("llama"), "tiny": lambda: tiny(tied=False)}
"""One whose own names begin with `model.`, and one with all kinds of shapes and buffers."""


@dataclass(frozen=True)
class Layout:
    """A way in which a trainer saves.

    Attributes:
        save: Saves a sharded module into a folder that it makes; called on all ranks.
        place: Where in the run's folder step 10 lies.
        found: How the description of what was found begins, with `{W}` for the world size.
        models: The models that it can save.
    """

    save: Callable[[Path, nn.Module], object]
    place: str
    found: str
    models: tuple[str, ...] = tuple(MODELS)


@dataclass(frozen=True)
class Exported:
    """What the command said and wrote."""

    source: Path
    found: str
    notes: list[str]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Runs:
    """The folders of runs, one for each layout and model."""

    root: Path
    world_size: int
    mesh: str

    def folder(self, layout: str, model: str) -> Path:
        return self.root / model / layout.replace(" ", "-")


def each(layouts: Mapping[str, Layout]) -> pytest.MarkDecorator:
    """Call a test with every layout and every model that it can save."""
    pairs = [(name, model) for name, layout in layouts.items() for model in layout.models]
    return pytest.mark.parametrize(("layout", "model"), pairs, ids=[f"{name}-{model}" for name, model in pairs])


def runs_of(layouts: Mapping[str, Layout]) -> Any:
    """Make a fixture: runs of all layouts on every mesh, with a step 9 that must not be taken for step 10."""

    @pytest.fixture(scope="module", params=MESHES, ids=["-".join(map(str, mesh)) for mesh in MESHES])
    def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        world_size, mesh = request.param
        made = Runs(tmp_path_factory.mktemp("runs"), world_size, mesh)
        hf_model("llama")  # what transformers imports for it, here once for all ranks
        run_ranks(_save_all, world_size, made, layouts)
        for name, model in ((name, model) for name, layout in layouts.items() for model in layout.models):
            run, place = made.folder(name, model), layouts[name].place
            if "10" in place:
                shutil.copytree(run / place, run / place.replace("10", "9"), symlinks=True)
        return made

    return runs


def _save_all(runs: Runs, layouts: Mapping[str, Layout]) -> None:
    for model, make in MODELS.items():
        module = shard(make(), runs.mesh, dist.get_world_size())
        for name, layout in layouts.items():
            if model in layout.models:
                layout.save(runs.folder(name, model) / layout.place, module)


def command(*arguments: object) -> dict[str, Any]:
    """Run the command in this process; return what `--json` prints."""
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"], prog_name="fsdp-export")
    assert result.exit_code == 0, (result.output, result.exception)
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def export(source: Path, out: Path, *options: object) -> Exported:
    """Export with the command, dtypes as they are unless options say otherwise."""
    said = command(source, "--out", out, "--no-fsync", "--dtype", "keep", *options)
    files = [out / name for name in said["files"] if name.endswith(".safetensors")]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return Exported(Path(said["source"]), said["found"], said["notes"], tensors)


def assert_exported(runs: Runs, layouts: Mapping[str, Layout], name: str, model: str, out: Path) -> None:
    """Export the newest step of a run; see that it is told from the others, and compare all values and names."""
    layout, run = layouts[name], runs.folder(name, model)
    folder = run / layout.place
    exported = export(run, out)
    assert exported.source == folder
    assert exported.found.startswith(layout.found.format(W=runs.world_size))
    assert_holds(exported, MODELS[model]().state_dict())
    for path in {folder, run.joinpath(*Path(layout.place).parts[:1])} if model == layout.models[0] else ():
        said = command(path, "--dry-run")
        assert (Path(said["source"]), said["found"]) == (folder, exported.found)


def assert_holds(exported: Exported, expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bits; files have their own order."""
    assert exported.tensors.keys() == expected.keys()
    assert_same({name: exported.tensors[name] for name in expected}, expected)
