import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import shard, tiny
from rank_folders import as_rank, cut, edit_archive, save_as_accelerate
from ranks import run_ranks
from refused.torch_file import REFUSED, Maker
from stored_sources import assert_equal, assert_holds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType

from fsdp_export.errors import ExportError
from fsdp_export.sources.base import Source
from fsdp_export.sources.torch_file import TorchFileSource, recognizes

FULL = torch.arange(40.0).view(8, 5)


def saved(folder: Path, content: Any, name: str = "model.pt", **options: Any) -> Path:
    torch.save(content, folder / name, **options)
    return folder / name


def read_all(path: Path) -> None:
    source = TorchFileSource(path)
    for spec in source.specs:
        assert source.rows(spec, 0, spec.num_rows).shape == spec.shape


def save_full(folder: Path) -> None:
    model = shard(tiny(), "1d", dist.get_world_size())
    save_as_accelerate(folder, model, StateDictType.FULL_STATE_DICT)


def test_what_accelerate_saved_in_full_is_read(tmp_path: Path) -> None:
    run_ranks(save_full, 2, tmp_path)
    source = TorchFileSource(tmp_path)
    assert_holds(source, tiny().state_dict())
    assert source.description == ("state dict pytorch_model_fsdp.bin, 15 tensors, 1.84 kB, float32 and int64")


def test_tied_tensors_keep_both_names(tmp_path: Path) -> None:
    model = tiny()
    assert model.head.weight is model.embed.weight
    source = TorchFileSource(saved(tmp_path, model.state_dict()))
    assert {"head.weight", "embed.weight"} < {spec.name for spec in source.specs}
    assert_holds(source, model.state_dict())


STATE = tiny().state_dict()
OPTIMIZER = {"state": {0: {"exp_avg": FULL, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


@pytest.mark.parametrize(
    ("content", "prefix"),
    [
        (STATE, ""),
        (dict(STATE), ""),
        ({"model": STATE, "optimizer": OPTIMIZER, "epoch": 3, "args": None}, "model"),
        ({"state_dict": STATE, "best": 0.5}, "state_dict"),
        ({"model_state_dict": STATE, "optimizer_state_dict": OPTIMIZER, "loss": torch.tensor(0.5)}, "model_state_dict"),
        ({"module": STATE}, "module"),
        ({"state": {"model": STATE, "optimizers": {"AdamW": OPTIMIZER}}, "rng": []}, "state.model"),
        ({"state": {"model": {f"model.{key}": STATE[key] for key in STATE}}, "rng": []}, "state.model.model"),
        ({"model": {f"module.{key}": STATE[key] for key in STATE}}, "model"),
        ({f"_orig_mod.{key}": STATE[key] for key in STATE}, ""),
        (
            {"state_dict": {f"net.{key}": STATE[key] for key in STATE}, "pytorch-lightning_version": "2.6.6"},
            "state_dict.net",
        ),
        ({"model": STATE, "ema": STATE}, "model"),
    ],
    ids=[
        "state dict",
        "dict",
        "model",
        "state_dict",
        "tutorial",
        "deepspeed",
        "composer",
        "composer of transformers",
        "ddp",
        "compiled",
        "lightning",
        "ema",
    ],
)
def test_the_model_is_found_and_nothing_else(content: Any, prefix: str, tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, content))
    assert_holds(source, STATE, num_slices=0)
    assert (f"below {prefix!r}" in source.description) == bool(prefix)


def test_a_given_prefix_counts_and_the_rest_is_listed(tmp_path: Path) -> None:
    file = saved(tmp_path, {"actor": {"w": FULL}, "critic": {"w": -FULL}, "step": 3, "optimizer": OPTIMIZER})
    source = TorchFileSource(file, prefix="critic.")
    assert_holds(source, {"w": -FULL})
    assert source.skipped == (
        "actor.w",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.step",
        "step",
        "optimizer.param_groups",
    )
    assert source.description == (
        "state dict model.pt, 1 tensor, 160 B, float32, below 'critic', 5 other entries left out"
    )


def test_plain_values_beside_the_model_do_not_matter(tmp_path: Path) -> None:
    values = {"set": {1, 2}, "complex": 1j, "bytes": b"\xff", "array": bytearray(b"x"), "counts": Counter("aab")}
    source = TorchFileSource(saved(tmp_path, {"model": {"w": FULL}, "others": values}))
    assert_holds(source, {"w": FULL})
    assert source.skipped == tuple(f"others.{name}" for name in values)
    torch.load(tmp_path / "model.pt", weights_only=True)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda full: full.t(),
    "permuted": lambda full: full.view(2, 4, 5).permute(2, 0, 1),
    "columns": lambda full: full[:, 1:3],
    "rows": lambda full: full[2:7],
    "every other": lambda full: full[::2, ::3],
    "one element": lambda full: full[3, 2],
    "none": lambda full: full[8:],
    "part of a larger one": lambda full: torch.cat([full] * 3)[8:16],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read(view: str, tmp_path: Path) -> None:
    tensor = VIEWS[view](FULL)
    assert_holds(TorchFileSource(saved(tmp_path, {"w": tensor, "full": FULL})), {"w": tensor, "full": FULL})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2fnuz,
        torch.float4_e2m1fn_x2,
        torch.int64,
        torch.uint16,
        torch.bool,
        torch.complex128,
    ],
    ids=str,
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_bytes_of_every_dtype_arrive(dtype: torch.dtype, protocol: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4, 16), dtype=torch.uint8, generator=draw)
    tensor = raw.view(dtype)
    state_dict = {"matrix": tensor, "scalar": tensor[0, 0, 0], "empty": tensor.new_empty(0, 5)}
    assert_holds(TorchFileSource(saved(tmp_path, state_dict, pickle_protocol=protocol)), state_dict)


def test_parameters_are_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    vars(model.bias)["no_decay"] = True
    source = TorchFileSource(saved(tmp_path, dict(model.named_parameters())))
    assert_holds(source, {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_a_dtensor_that_is_whole_is_read(tmp_path: Path) -> None:
    with as_rank(0, 1):
        file = saved(tmp_path, {"w": cut(FULL, init_device_mesh("cpu", (1,)), [(0, 0)])})
    assert_holds(TorchFileSource(file), {"w": FULL})


def save_in_parts(folder: Path) -> dict[str, torch.Tensor]:
    """Save as `save_pretrained(safe_serialization=False)` did in two files, with a tensor that the index lacks."""
    names = list(STATE)
    parts = {"pytorch_model-00001-of-00002.bin": names[:5], "pytorch_model-00002-of-00002.bin": names[5:]}
    for file, part in parts.items():
        saved(folder, {"stale": FULL, **{name: STATE[name] for name in part}}, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return STATE


@pytest.mark.parametrize("name", ["", "pytorch_model.bin.index.json"])
def test_files_with_an_index_are_one_model(name: str, tmp_path: Path) -> None:
    expected = save_in_parts(tmp_path)
    source = TorchFileSource(tmp_path / name)
    assert_holds(source, expected)
    assert source.skipped == ("stale", "stale")
    assert source.description == (
        "state dict pytorch_model.bin.index.json, 2 files, 15 tensors, 1.84 kB, float32 and int64, 2 other entries "
        "left out"
    )
    assert_holds(
        TorchFileSource(tmp_path / "pytorch_model-00002-of-00002.bin", prefix="head"), {"weight": STATE["head.weight"]}
    )


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin", "rng_state_0.pth"], "pytorch_model_fsdp.bin"),
        (["pytorch_model.bin", "training_args.bin", "pytorch_model_fsdp.bin"], "pytorch_model.bin"),
        (["consolidated.00.pth", "params.json"], "consolidated.00.pth"),
        (["last.ckpt", "events.out"], "last.ckpt"),
        (["pytorch_model.bin", "adapter_model.bin"], "pytorch_model.bin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_file_that_is_meant_is_chosen(names: Sequence[str], chosen: str, tmp_path: Path) -> None:
    for name in names:
        saved(tmp_path, {"w": FULL if name == chosen else -FULL}, name)
    assert recognizes(names)
    assert_holds(TorchFileSource(tmp_path), {"w": FULL})


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["model.safetensors", "config.json"],
        ["optim_world_size_2_rank_0.pt", "extra_state_world_size_2_rank_0.pt", "data.pt"],
        ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"],
        ["ep1-ba10-rank0.pt", "model_final.rank_0.pth", "mp_rank_00_model_states.pt"],
        ["adapter_model.bin", "random_states_0.pkl", "meta.pt"],
    ],
    ids=str,
)
def test_files_of_other_state_are_not_recognized(names: list[str]) -> None:
    assert not recognizes(names)


def test_only_the_wanted_rows_are_read(reads: list[int], tmp_path: Path) -> None:
    full = torch.randn(1000, 256)
    source = TorchFileSource(
        saved(tmp_path, {"model": {"w": full}, "optimizer": {"state": {0: {"exp_avg": full + 1}}}})
    )
    assert sum(reads) < 3000
    reads.clear()
    assert_equal(source.rows(source.specs[0], 490, 510), full[490:510])
    assert sum(reads) < 20 * 256 * 4 + 300
    reads.clear()
    source.rows(source.specs[0], 10, 13)
    assert sum(reads) == 3 * 256 * 4


def test_it_is_a_source_all_of_which_every_rank_has(tmp_path: Path) -> None:
    file = saved(tmp_path, {"w": FULL})
    source: Source = TorchFileSource(file, ranks=(0, 1), rank=1, device=torch.device("meta"))
    assert (source.ranks, source.rank, source.device, source.folder) == ((0, 1), 1, torch.device("meta"), tmp_path)
    (spec,) = source.specs
    assert [ranks for _, ranks in spec.sharding.holders(spec.shape)] == [(0, 1)]
    assert (source.copies, source.groups) == ((), {})
    source.refresh()


def test_the_file_can_be_closed_and_opens_again(tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, {"w": FULL}))
    source.close()
    assert_holds(source, {"w": FULL})


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED])
def test_what_cannot_be_read_is_refused(make: Maker, error: type[ExportError], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    name = make(folder)
    with pytest.raises(ExportError) as caught:
        read_all(folder / name)
    assert str(caught.value).replace(str(folder), "{folder}") == message
    assert type(caught.value) is error
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("only_pickle", [False, True], ids=["file", "pickle"])
def test_flipped_bytes_give_our_errors_or_values_of_the_right_shape(only_pickle: bool, tmp_path: Path) -> None:
    content = {"model": {"w": FULL, "v": FULL.bfloat16().t()}, "optimizer": OPTIMIZER}
    file = saved(tmp_path, content)
    intact = file.read_bytes()
    draw = random.Random(0)

    def flip(data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 8])):
            damaged[draw.randrange(len(data))] ^= draw.randint(1, 255)
        return bytes(damaged)

    for _ in range(300):
        if only_pickle:
            file.write_bytes(intact)
            edit_archive(file, lambda name, data: flip(data) if name == "data.pkl" else data)
        else:
            file.write_bytes(flip(intact))
        try:
            read_all(file)
        except ExportError:
            continue
