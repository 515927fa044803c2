import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import edit_metadata, put_together, save
from hf_folders import INDEX, write, write_shard
from refused.dcp import Runs
from safetensors.torch import load_file

from fsdp_export.api import export_checkpoint
from fsdp_export.errors import NotFoundError, SourceError, UnsafeInputError, UsageError
from fsdp_export.sources import dcp, dcp_metadata, survey
from fsdp_export.sources.detect import open_source

EXPECTED = "DCP, rank files or shards of safetensors there or up to 4 levels below"
WAY_OUT = "Name the folder of a checkpoint, or make one to try with: fsdp-export --demo --out ckpt/."
DEEPSPEED = "global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt"


def make(root: Path, *folders: str) -> None:
    """Put DCP checkpoints into folders, each a second younger than the one before."""
    for second, folder in enumerate(folders):
        put_together(root / folder, {"w": torch.zeros(2)})
        os.utime(root / folder / ".metadata", (second, second))


def find_checkpoint(path: Path) -> Path | None:
    return open_source(path).folder


def touch(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["."], "."),
        (["ckpt"], "ckpt"),
        (["a/b/c/d"], "a/b/c/d"),
        (["step-500", "step-1000", "step-900"], "step-1000"),
        (["outputs/checkpoint/step-20", "outputs/checkpoint/step-3"], "outputs/checkpoint/step-20"),
        (
            ["checkpoint-9/pytorch_model_fsdp_0", "checkpoint-10/pytorch_model_fsdp_0"],
            "checkpoint-10/pytorch_model_fsdp_0",
        ),
        (["checkpoint-10/pytorch_model_fsdp_0", "checkpoint-10/optimizer_0"], "checkpoint-10/pytorch_model_fsdp_0"),
        (["epoch_1_step_500", "epoch_2_step_30"], "epoch_2_step_30"),
        (["epoch_1/step_500", "epoch_2/step_30"], "epoch_2/step_30"),
        (["ep9-ba90000", "ep10-ba50000"], "ep10-ba50000"),
        (["iter_0000500", "iter_0000090"], "iter_0000500"),
        (["global_step_5", "global_step_12"], "global_step_12"),
        (["500", "90"], "500"),
        (["epoch=3-step=5", "epoch=3-step=40"], "epoch=3-step=40"),
        (["global_step_5/policy", "global_step_12/policy"], "global_step_12/policy"),
        (["step_5/policy/weights", "step_5/policy/optimizer"], "step_5/policy/weights"),
        (["old", "new"], "new"),
        (["step-500", "final"], "final"),
        (["step-500", "step-500/inner"], "step-500"),
        (["step-5", ".fsdp-export-writing/step-9"], "step-5"),
        (["policy_v2_step_7", "policy_v9_step_6"], "policy_v2_step_7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_newest_checkpoint_is_found(folders: list[str], expected: str, tmp_path: Path) -> None:
    make(tmp_path, *folders)
    assert find_checkpoint(tmp_path) == tmp_path / expected


def test_the_metadata_file_names_its_folder(tmp_path: Path) -> None:
    make(tmp_path, "step-5")
    assert find_checkpoint(tmp_path / "step-5" / ".metadata") == tmp_path / "step-5"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("latest_checkpointed_iteration.txt", "500"),
        ("latest_checkpointed_iteration.txt", "0500\n"),
        ("latest_ckpt_global_step.txt", "500"),
        ("LATEST", "global_step_500\n"),
        ("LATEST", "/elsewhere/runs/global_step_500/"),
        ("latest", "global_step_500"),
    ],
    ids=repr,
)
def test_the_step_that_the_trainer_wrote_down_counts_first(file: str, text: str, tmp_path: Path) -> None:
    make(tmp_path, "run/global_step_500/model", "run/global_step_600/model")
    (tmp_path / "run" / file).write_text(text)
    assert find_checkpoint(tmp_path) == tmp_path / "run/global_step_500/model"


def test_a_link_called_latest_counts_first(tmp_path: Path) -> None:
    make(tmp_path, "step-500", "step-600")
    (tmp_path / "LATEST").symlink_to("step-500")
    assert find_checkpoint(tmp_path) == tmp_path / "step-500"


def test_a_step_written_down_that_is_gone_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "step-500")
    (tmp_path / "LATEST").write_text("step-600")
    assert find_checkpoint(tmp_path) == tmp_path / "step-500"
    assert caplog.messages == [f"the latest step of {tmp_path} is said to be 'step-600', which is not there"]


def test_links_to_steps_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    make(tmp_path, "disk/step-7", "run/step-6")
    (tmp_path / "run" / "step-7").symlink_to(tmp_path / "disk" / "step-7")
    (tmp_path / "run" / "step-6" / "up").symlink_to(tmp_path)
    (tmp_path / "run" / "round").symlink_to(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-7"


def test_an_incomplete_step_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "step-1", "step-2", "step-3", "step-4", "step-5")
    (tmp_path / "step-5" / ".metadata").unlink()
    (tmp_path / "step-4" / "__0_0.distcp").unlink()
    os.truncate(tmp_path / "step-3" / "__0_0.distcp", 9)
    os.truncate(tmp_path / "step-2" / ".metadata", 9)
    (tmp_path / "LATEST").write_text("step-4")
    with caplog.at_level(logging.WARNING, "fsdp_export"):
        assert find_checkpoint(tmp_path) == tmp_path / "step-1"
    skipped = ["missing __0_0.distcp", "no .metadata", "truncated data files", "a damaged pickle"]
    assert [record.split(" in ")[0] for record in caplog.messages] == [
        f"an incomplete checkpoint is skipped: {text}{' (rank 0)' * text.startswith('missing')}" for text in skipped
    ]


def test_only_incomplete_steps_give_the_error_of_the_newest(tmp_path: Path) -> None:
    make(tmp_path, "step-1", "step-2")
    (tmp_path / "step-1" / ".metadata").unlink()
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    with pytest.raises(SourceError, match=r"missing __0_0\.distcp \(rank 0\) in .*step-2"):
        find_checkpoint(tmp_path)


def test_an_unsafe_step_is_not_skipped(tmp_path: Path) -> None:
    make(tmp_path, "step-1", "step-2")
    edit_metadata(tmp_path / "step-2", lambda metadata: setattr(metadata, "planner_data", Runs(tmp_path / "ran")))
    with pytest.raises(UnsafeInputError):
        find_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("folders", "listed"),
    [
        (["step-5/actor", "step-5/critic"], "step-5/actor, step-5/critic"),
        (["actor", "critic"], "actor, critic"),
        (["global_step_5/policy", "global_step_5/critic"], "global_step_5/critic, global_step_5/policy"),
        (["a/step-5", "b/step-5", "b/step-4"], "a/step-5, b/step-5"),
    ],
    ids=["roles in a step", "roles", "roles of SkyRL", "runs"],
)
def test_equally_good_checkpoints_are_listed(folders: list[str], listed: str, tmp_path: Path) -> None:
    make(tmp_path, *folders)
    with pytest.raises(UsageError) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"several checkpoints that could be meant in {tmp_path}: found {listed}. Name one of them."
    )


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], "nothing"),
        (["notes.txt", "logs/out.txt"], "logs, notes.txt"),
        (
            ["model/model-00001-of-00002.safetensors", "model/config.json"],
            "model/model-00001-of-00002.safetensors (safetensors: name their folder)",
        ),
        (
            ["adapter_model.safetensors", "adapter_config.json"],
            "adapter_model.safetensors (an adapter of PEFT: name it to cast or filter it)",
        ),
        (
            ["huggingface/config.json", "huggingface/tokenizer.json"],
            "huggingface",
        ),
        (
            [DEEPSPEED, "run/last.ckpt"],
            f"{DEEPSPEED} (a checkpoint of DeepSpeed, not read), run/last.ckpt (a file of torch.save: name it)",
        ),
    ],
    ids=["empty", "others", "safetensors", "adapter", "verl without weights", "deepspeed"],
)
def test_what_is_there_instead_is_said(files: list[str], found: str, tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (f"no sharded checkpoint in {tmp_path}: expected {EXPECTED}, found {found}. {WAY_OUT}")


def test_a_checkpoint_five_levels_below_is_not_looked_for(tmp_path: Path) -> None:
    make(tmp_path, "a/b/c/d/e")
    with pytest.raises(NotFoundError, match="no sharded checkpoint"):
        find_checkpoint(tmp_path)


def test_it_says_when_there_are_too_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_MAX_FOLDERS", 3)
    touch(tmp_path, *(f"{number}/log.txt" for number in range(5)))
    with pytest.raises(NotFoundError, match=r"found 0, 1, 2, 3, 4, in the folders that were looked into\. "):
        find_checkpoint(tmp_path)


def test_optimizers_alone_are_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-5/optimizer_0", "checkpoint-6/optimizer_0")
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"only optimizer state in {tmp_path}: found checkpoint-5/optimizer_0, checkpoint-6/optimizer_0. {WAY_OUT}"
    )


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path / "nothing")
    assert str(caught.value) == f"{tmp_path / 'nothing'} does not exist. {WAY_OUT}"


def test_a_part_of_a_checkpoint_that_is_named_gives_its_own_error(tmp_path: Path) -> None:
    make(tmp_path, ".")
    (tmp_path / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"no \.metadata in .* found data files of rank 0"):
        open_source(tmp_path)


def test_a_checkpoint_is_found_and_opened(tmp_path: Path) -> None:
    save(tmp_path / "step-5", {"actor": {"w": torch.arange(3)}, "critic": {"w": torch.zeros(2)}})
    source = open_source(tmp_path, prefix="actor.", ranks=(0, 1), rank=1, device=torch.device("meta"))
    assert source.folder == tmp_path / "step-5"
    assert (source.ranks, source.rank, source.device) == ((0, 1), 1, torch.device("meta"))
    assert source.rows(source.specs[0], 1, 3).is_meta
    assert open_source(tmp_path, prefix="actor.").rows(source.specs[0], 1, 3).tolist() == [1, 2]


def test_metadata_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "step-1", "step-2", "step-3")
    (tmp_path / "step-3" / "__0_0.distcp").unlink()
    folders = []

    def counted(folder: Path, names: Any) -> Any:
        folders.append(folder.name)
        return dcp_metadata.read_metadata(folder, names)

    monkeypatch.setattr(dcp, "read_metadata", counted)
    assert find_checkpoint(tmp_path) == tmp_path / "step-2"
    assert folders == ["step-3", "step-2"]


W = torch.arange(6.0).view(3, 2)


def put_dcp(folder: Path) -> Path:
    return put_together(folder, {"w": W}) / "__0_0.distcp"


def put_metadata_per_rank(folder: Path) -> Path:
    return put_together(folder, {"w": W}, only_rank=0) / "__0.metadata"


def put_rank_files(folder: Path) -> Path:
    return put_state_dict(folder, "model_world_size_1_rank_0.pt")


def put_rank_files_of_accelerate(folder: Path) -> Path:
    return put_state_dict(folder, "pytorch_model_fsdp_0_rank0.bin")


def put_shards(folder: Path) -> Path:
    for rank in range(2):
        file = folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        write_shard(file, {"w": (W[2 * rank :][:2], [2 * rank, 0])})
    return file


def put_full_of_accelerate(folder: Path) -> Path:
    return put_state_dict(folder, "pytorch_model_fsdp.bin")


def put_hugging_face(folder: Path) -> Path:
    return write(folder, {"model.safetensors": {"w": W}}) / "model.safetensors"


def put_hugging_face_with_index(folder: Path) -> Path:
    return (
        write(folder, {f"model-0000{part}-of-00002.safetensors": {f"{part}": W} for part in (1, 2)}, index=True) / INDEX
    )


def put_state_dict(folder: Path, name: str = "consolidated.00.pth") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"w": W}, folder / name)
    return folder / name


SHARDED = {
    "DCP checkpoint": put_dcp,
    "DCP checkpoint of 1 rank": put_metadata_per_rank,
    "verl rank files": put_rank_files,
    "accelerate rank files": put_rank_files_of_accelerate,
    "shards of torch's Hugging Face writer": put_shards,
    "state dict pytorch_model_fsdp.bin": put_full_of_accelerate,
}
WHOLE = {
    "Hugging Face folder": put_hugging_face,
    "Hugging Face folder, 2 files": put_hugging_face_with_index,
    "state dict consolidated.00.pth": put_state_dict,
}


@pytest.mark.parametrize(("kind", "put"), (SHARDED | WHOLE).items(), ids=[*SHARDED, *WHOLE])
def test_every_layout_is_recognized_where_it_is_named(kind: str, put: Callable[[Path], Path], tmp_path: Path) -> None:
    file = put(tmp_path / "ckpt")
    for path in (tmp_path / "ckpt", file):
        source = open_source(path, ranks=(0, 1), rank=1, device=torch.device("meta"))
        expected = kind.replace("Hugging Face folder", "safetensors file") if path.name == "model.safetensors" else kind
        assert source.description.startswith(expected)
        assert source.folder == tmp_path / "ckpt"
        assert (source.ranks, source.rank, source.device) == ((0, 1), 1, torch.device("meta"))
        assert source.rows(source.specs[0], 0, 3).is_meta
        assert torch.equal(open_source(path).rows(source.specs[0], 0, 3), W)


@pytest.mark.parametrize("put", [*SHARDED.values(), *WHOLE.values()], ids=[*SHARDED, *WHOLE])
def test_every_layout_is_exported(put: Callable[[Path], Path], tmp_path: Path) -> None:
    put(tmp_path / "run" / "ckpt")
    report = export_checkpoint(tmp_path / "run" / "ckpt", tmp_path / "out")
    exported = load_file(report.path / "model.safetensors")
    assert exported
    assert all(torch.equal(tensor, W) for tensor in exported.values())


@pytest.mark.parametrize(("kind", "put"), SHARDED.items(), ids=list(SHARDED))
def test_sharded_checkpoints_are_found_below_a_run_folder(
    kind: str, put: Callable[[Path], Path], tmp_path: Path
) -> None:
    for step in (9, 10, 8):
        put(tmp_path / "run" / f"global_step_{step}" / "actor")
    touch(tmp_path / "run" / "global_step_11" / "actor" / "huggingface", "config.json", "tokenizer.json")
    source = open_source(tmp_path)
    assert source.folder == tmp_path / "run" / "global_step_10" / "actor"
    assert source.description.startswith(kind)


@pytest.mark.parametrize("put", WHOLE.values(), ids=list(WHOLE))
def test_whole_models_below_a_run_folder_do_not_count(put: Callable[[Path], Path], tmp_path: Path) -> None:
    put(tmp_path / "base-model")
    put(tmp_path / "step-9" / "exported")
    with pytest.raises(NotFoundError, match="no sharded checkpoint in "):
        open_source(tmp_path)
    make(tmp_path, "step-5")
    assert find_checkpoint(tmp_path) == tmp_path / "step-5"


def test_a_hugging_face_folder_that_is_named_comes_before_what_is_below_it(tmp_path: Path) -> None:
    put_hugging_face(tmp_path)
    make(tmp_path, "checkpoint-5/pytorch_model_fsdp_0")
    assert find_checkpoint(tmp_path) == tmp_path


def test_an_export_of_ours_that_is_named_comes_after_what_is_below_it(tmp_path: Path) -> None:
    put_hugging_face(tmp_path)
    touch(tmp_path, "fsdp_export.json")
    assert find_checkpoint(tmp_path) == tmp_path
    make(tmp_path, "step-5")
    assert find_checkpoint(tmp_path) == tmp_path / "step-5"


@pytest.mark.parametrize(
    "files",
    [
        ["scheduler.pt", "rng_state_0.pth", "optimizer.bin", "training_args.bin"],
        ["adapter_model.safetensors", "adapter_config.json"],
        ["custom.pt"],
    ],
    ids=["trainer", "peft", "a file of torch.save"],
)
def test_other_files_of_a_folder_do_not_hide_the_checkpoint_in_it(files: list[str], tmp_path: Path) -> None:
    touch(tmp_path, *files)
    make(tmp_path, "pytorch_model_fsdp_0")
    assert find_checkpoint(tmp_path) == tmp_path / "pytorch_model_fsdp_0"


def test_a_trainer_that_saved_its_model_twice_is_read_in_safetensors(tmp_path: Path) -> None:
    for step in (5, 10):
        put_hugging_face(tmp_path / f"checkpoint-{step}")
        put_full_of_accelerate(tmp_path / f"checkpoint-{step}")
    for path in (tmp_path, tmp_path / "checkpoint-10"):
        source = open_source(path)
        assert source.folder == tmp_path / "checkpoint-10"
        assert source.description.startswith("Hugging Face folder")


def test_of_an_automodel_run_the_latest_step_is_read_as_put_together(tmp_path: Path) -> None:
    for step in (10, 20):
        put_shards(tmp_path / f"epoch_0_step_{step}" / "model")
        make(tmp_path, f"epoch_0_step_{step}/optim")
    (tmp_path / "LATEST").symlink_to("epoch_0_step_20")
    (tmp_path / "LOWEST_VAL").symlink_to("epoch_0_step_10")
    assert find_checkpoint(tmp_path) == tmp_path / "epoch_0_step_20" / "model"
    put_hugging_face(tmp_path / "epoch_0_step_20" / "model" / "consolidated")
    assert find_checkpoint(tmp_path) == tmp_path / "epoch_0_step_20" / "model" / "consolidated"
    (tmp_path / "LATEST").unlink()
    (tmp_path / "LATEST.txt").write_text("epoch_0_step_10")
    assert find_checkpoint(tmp_path) == tmp_path / "epoch_0_step_10" / "model"


@pytest.mark.parametrize("weights", ["policy/weights", "policy/weights/model"])
@pytest.mark.parametrize("wrapper", ["", "model"])
def test_of_a_nemo_rl_run_the_newest_policy_is_read(weights: str, wrapper: str, tmp_path: Path) -> None:
    model = {"model.embed.weight": W, "lm_head.weight": W}
    for step in (5, 10):
        save(tmp_path / f"step_{step}" / weights, {wrapper: model} if wrapper else model)
        make(tmp_path, f"step_{step}/policy/optimizer/optim")
        touch(tmp_path, f"step_{step}/policy/tokenizer/tokenizer.json", f"step_{step}/config.yaml")
    source = open_source(tmp_path)
    assert source.folder == tmp_path / "step_10" / weights
    assert [spec.name for spec in source.specs] == list(model)


def test_of_a_skyrl_run_the_policy_of_the_step_that_was_written_down_is_read(tmp_path: Path) -> None:
    for step in (5, 10):
        put_rank_files(tmp_path / f"global_step_{step}" / "policy")
        touch(tmp_path, f"global_step_{step}/trainer_state.pt", f"global_step_{step}/data.pt")
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_10" / "policy"
    (tmp_path / "latest_ckpt_global_step.txt").write_text("5")
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_5" / "policy"


def test_what_is_put_together_is_not_found_where_its_shards_are(tmp_path: Path) -> None:
    put_hugging_face(tmp_path / "step-5")
    put_shards(tmp_path / "step-5" / "sharded")
    assert find_checkpoint(tmp_path) == tmp_path / "step-5" / "sharded"
    shutil.rmtree(tmp_path / "step-5" / "sharded")
    with pytest.raises(NotFoundError):
        find_checkpoint(tmp_path)


def test_incomplete_shards_are_skipped_for_an_older_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_rank_files(tmp_path / "step-8")
    os.truncate(put_shards(tmp_path / "step-9"), 50)
    put_dcp(tmp_path / "step-10").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "step-8"
    assert [message.split(" in ")[0] for message in caplog.messages] == [
        "an incomplete checkpoint is skipped: missing __0_0.distcp (rank 0)",
        "an incomplete checkpoint is skipped: a truncated safetensors file",
    ]
