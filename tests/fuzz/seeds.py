"""Sound checkpoints of every layout, small enough to make, damage and read in milliseconds."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from dcp_folders import put_together, save
from hf_folders import write, write_index, write_shard
from hub_folders import write_hub_folder
from rank_folders import Zoo, cut, put_ranks
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh

from fsdp_export import export_checkpoint

__all__ = ["Run", "Seed", "make_seeds"]

_SAVED = Path(__file__).parents[1] / "sources" / "rank_files"
_MIN_RUN_BYTES = 4

Place = tuple[str, int]
"""A file, relative to the seed's folder, and a byte in it."""


@dataclass(frozen=True)
class Run:
    """Bytes of a tensor that lie in one piece.

    Attributes:
        begin: The first of them in the tensor.
        data: They.
        places: Where they lie; in several places if there are copies.
    """

    begin: int
    data: bytes
    places: tuple[Place, ...]


@dataclass
class Seed:
    """A checkpoint whose values are known.

    Attributes:
        name: What it is called.
        folder: Where it lies.
        expected: The tensors that reading it gives.
        prefix: What their names begin with in the checkpoint.
        library: Which library reads it, for `libraries.read`; empty for one that no installed one reads.
        source: What is opened, relative to the folder.
        older: The tensors of an older step, which is read where the newest is refused.
        is_written: Whether it is what an export has written.
        runs: Where the values lie; without an entry for what is compressed.
    """

    name: str
    folder: Path
    expected: dict[str, torch.Tensor]
    library: str
    prefix: str = ""
    source: str = ""
    older: dict[str, torch.Tensor] = field(default_factory=dict)
    is_written: bool = False
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        for name, tensor in self.expected.items():
            runs = list(self._runs(tensor))
            if all(run.places for run in runs):
                self.runs[name] = runs

    def _runs(self, tensor: torch.Tensor) -> Iterator[Run]:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        row = max(tensor.shape[-1] if tensor.shape else 1, 1) * tensor.dtype.itemsize
        waiting = [(begin, begin + row) for begin in range(0, len(data), row)]
        while waiting:
            begin, end = waiting.pop()
            places = tuple((name, at) for name, content in self.files.items() for at in _find(content, data[begin:end]))
            if not places and end - begin > _MIN_RUN_BYTES:
                middle = begin + (end - begin) // 2 // _MIN_RUN_BYTES * _MIN_RUN_BYTES or begin + _MIN_RUN_BYTES
                waiting += [(begin, middle), (middle, end)]
            else:
                yield Run(begin, data[begin:end], places)


def _find(content: bytes, data: bytes) -> Iterator[int]:
    at = content.find(data)
    while at >= 0:
        yield at
        at = content.find(data, at + 1)


def tensors() -> dict[str, torch.Tensor]:
    """Return a model's tensors: random, so that their bytes are found again in files."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    return {
        "embed.weight": some(7, 6),
        "layers.0.norm.weight": some(8, dtype=torch.bfloat16),
        "layers.0.proj.weight": some(5, 6),
        "layers.0.proj.bias": some(3, dtype=torch.float64),
        "layers.0.count": torch.randint(2**61, 2**62, (), generator=draw),
        "layers.0.none": some(0, 4),
        "layers.1.table": some(9, 4, dtype=torch.float16),
        "scale": some(1),
    }


def make_seeds(root: Path) -> list[Seed]:
    """Make all seeds that the installed packages can make, in folders below a root."""
    seeds = []
    for maker in _MAKERS:
        folder = root / maker.__name__
        folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            facts = maker(folder)
        if facts is not None:
            seeds.append(Seed(maker.__name__, folder, **{"expected": tensors(), **facts}))
    return seeds


_Facts = dict[str, Any]
_Maker = Callable[[Path], "_Facts | None"]
_MAKERS: list[_Maker] = []


def _seed(maker: _Maker) -> _Maker:
    _MAKERS.append(maker)
    return maker


def _nested() -> dict[str, Any]:
    moments = {f"state.{name}.exp_avg": torch.ones_like(tensor) for name, tensor in tensors().items()}
    return {"model": tensors(), "optimizer": moments, "step": 3}


def _halves(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """Cut into blocks of dims 0 and 1, as FSDP with tensor parallelism does."""
    cuts = [(slice(0, size // 2), slice(size // 2, size)) if size > 1 else (slice(0, size),) for size in tensor.shape]
    blocks: list[tuple[slice, ...]] = [()]
    for parts in cuts:
        blocks = [(*block, part) for block in blocks for part in parts]
    return blocks


@_seed
def dcp_nested(folder: Path) -> _Facts:
    save(folder / "run" / "step-500", _nested())
    save(folder / "run" / "step-400", {"model": {"old": torch.ones(2)}})
    (folder / "run" / "LATEST").write_text("step-500\n")
    (folder / "run" / "config.json").write_text('{"model_type": "unknown", "architectures": ["FSDPThing"]}\n')
    return {"library": "dcp", "prefix": "model.", "source": "run", "older": {"old": torch.ones(2)}}


@_seed
def dcp_blocks(folder: Path) -> _Facts:
    put_together(folder, tensors(), _halves, num_files=3)
    return {"library": "dcp"}


@_seed
def dcp_of_ranks(folder: Path) -> _Facts:
    full = tensors()
    copied = {name: full.pop(name) for name in ("scale", "layers.0.count")}
    for rank in range(2):
        put_together(folder, {**full, **copied}, lambda tensor, rank=rank: _halves(tensor)[rank::2], only_rank=rank)  # type: ignore[misc]
        if rank:  # copies of what cannot be halved
            again = put_together(folder / "again", copied, only_rank=rank)
            _append(folder, again, rank)
    return {"library": "dcp"}


def _append(folder: Path, other: Path, rank: int) -> None:
    """Move what another folder has of a rank to the end of this one's files."""
    metadata, more = (pickle.loads((path / f"__{rank}.metadata").read_bytes()) for path in (folder, other))
    data = folder / f"__{rank}_0.distcp"
    for index, info in more.storage_data.items():
        info.offset += data.stat().st_size
        metadata.storage_data[index] = info
        metadata.state_dict_metadata[index.fqn] = more.state_dict_metadata[index.fqn]
    data.write_bytes(data.read_bytes() + (other / data.name).read_bytes())
    (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
    for file in other.iterdir():
        file.unlink()
    other.rmdir()


@_seed
def dcp_zstd(folder: Path) -> _Facts | None:
    if not ZStandard.is_available():
        return None
    save(folder, tensors(), storage_writer=FileSystemWriter(folder, _extensions=[ZStandard()]))
    return {"library": "dcp"}


@_seed
def dcp_safetensors(folder: Path) -> _Facts:
    writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    save(folder, tensors(), storage_writer=writer)
    return {"library": "dcp"}


def _sharded(_rank: int) -> dict[str, Any]:
    """Cut tensors on a mesh of 2x2, some by both axes, in either order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    cuts: Mapping[str, list[tuple[int, int]]] = {
        "embed.weight": [(0, 1), (0, 0)],
        "layers.0.proj.weight": [(0, 0), (1, 1)],
        "layers.1.table": [(0, 0)],
        "layers.0.none": [(0, 0)],
    }
    return {name: cut(full, mesh, cuts[name]) if name in cuts else full for name, full in tensors().items()}


@_seed
def verl(folder: Path) -> _Facts:
    actor = folder / "global_step_20" / "actor"
    put_ranks(actor, _sharded, 4)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    (actor / "huggingface").mkdir()
    hub = write_hub_folder(folder / "hub")
    for file in sorted(hub.iterdir()):
        if file.suffix == ".json":
            file.rename(actor / "huggingface" / file.name)
        else:
            file.unlink()
    hub.rmdir()
    return {"library": "ranks"}


@_seed
def accelerate(folder: Path) -> _Facts:
    def state_dict(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        return {name: cut(full, mesh, [(0, 0)]) if full.dim() else full for name, full in tensors().items()}

    put_ranks(folder / "checkpoint-10", state_dict, 2, name=lambda rank, _: f"pytorch_model_fsdp_0_rank{rank}.bin")
    (folder / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
    return {"library": "ranks"}


def _zoo(folder: Path, version: str) -> _Facts:
    with zipfile.ZipFile(_SAVED / f"torch-{version}.zip") as archive:
        archive.extractall(folder)
    return {"library": "ranks", "expected": {name: value.detach() for name, value in Zoo().state_dict().items()}}


@_seed
def verl_of_torch_2_8(folder: Path) -> _Facts:
    return _zoo(folder, "2.8.0") | {"library": ""}


@_seed
def verl_of_torch_2_14(folder: Path) -> _Facts:
    return _zoo(folder, "2.14.1")


@_seed
def torch_file(folder: Path) -> _Facts:
    torch.save(_nested(), folder / "model.pt")
    return {"library": "torch", "prefix": "model."}


@_seed
def torch_files_with_index(folder: Path) -> _Facts:
    names = list(tensors())
    index: dict[str, str] = {}
    for number, part in enumerate((names[:4], names[4:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors()[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    write_index(folder, index, "pytorch_model.bin.index.json")
    return {"library": "torch"}


@_seed
def hf_single(folder: Path) -> _Facts:
    write(folder, {"model.safetensors": tensors()})
    return {"library": "safetensors"}


@_seed
def hf_index(folder: Path) -> _Facts:
    full = tensors()
    names = list(full)
    parts = {
        f"model-0000{number}-of-00002.safetensors": {name: full[name] for name in names[number - 1 :: 2]}
        for number in (1, 2)
    }
    write(folder, parts, index=True)
    write_hub_config(folder)
    return {"library": "safetensors"}


def write_hub_config(folder: Path) -> None:
    """Write a config that needs edits, with code, and a tokenizer that names code, too."""
    (folder / "config.json").write_text(
        '{\n  "architectures": ["FSDPMine"],\n  "auto_map": {"AutoModel": "modeling_mine.Mine"},\n'
        '  "model_type": "mine",\n  "dtype": "bfloat16",\n  "text_config": {"dtype": "bfloat16"}, "name": "é"\n}\n'
    )
    (folder / "modeling_mine.py").write_text("from .helpers_mine import thing\nimport os\n")
    (folder / "helpers_mine.py").write_text("raise SystemExit('run')\n")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["helpers_mine.Tokenizer", null]}}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


@_seed
def hf_of_ranks(folder: Path) -> _Facts:
    full = tensors()
    for rank in range(2):
        blocks = {}
        for name, tensor in full.items():
            if len(mine := _halves(tensor)[rank::2]):
                start = [part.indices(size)[0] for part, size in zip(mine[0], tensor.shape, strict=True)]
                first, last = mine[0], mine[-1]
                joined = tuple(slice(a.start, b.stop) for a, b in zip(first, last, strict=True))
                blocks[name] = (tensor[joined], start)
        write_shard(folder / "sharded" / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", blocks)
    return {"library": "shards"}


@_seed
def llama_written(folder: Path) -> _Facts:
    """Export a tiny Llama of the hub with tied weights: config, tokenizer, index and the record of the export."""
    hub = write_hub_folder(folder / "hub")
    config = (hub / "config.json").read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    (hub / "config.json").write_text(config)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(config)))
    state_dict = model.state_dict()
    save(folder / "dcp", state_dict)
    export_checkpoint(folder / "dcp", folder / "written", base_model=hub, max_shard_size="8KB", fsync=False)
    for other in (hub, folder / "dcp"):
        for file in other.iterdir():
            file.unlink()
        other.rmdir()
    expected = {name: value for name, value in state_dict.items() if name != "lm_head.weight"}
    return {"library": "safetensors", "expected": expected, "source": "written", "is_written": True}
