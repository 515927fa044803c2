import logging
import os
from pathlib import Path

import pytest
import torch
from dcp_folders import edit_metadata, put_together, save
from refused.dcp import Runs

from fsdp_export.errors import NotFoundError, SourceError, UnsafeInputError, UsageError
from fsdp_export.sources.detect import find_checkpoint, open_source

WAY_OUT = "Name the folder of a checkpoint, or make one to try with: fsdp-export --demo --out ckpt/."
DEEPSPEED = "global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt"


def make(root: Path, *folders: str) -> None:
    """Put checkpoints into folders, each a second younger than the one before."""
    for second, folder in enumerate(folders):
        put_together(root / folder, {"w": torch.zeros(2)})
        os.utime(root / folder / ".metadata", (second, second))


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
        (["a/step-5", "b/step-5", "b/step-4"], "a/step-5, b/step-5"),
    ],
    ids=["roles in a step", "roles", "runs"],
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
            ["step_5/actor/model_world_size_2_rank_0.pt", "step_5/actor/model_world_size_2_rank_1.pt"],
            "rank files of verl (step_5/actor/model_world_size_2_rank_0.pt), not read yet",
        ),
        (
            ["model-00001-of-00002.safetensors", "config.json"],
            "safetensors (model-00001-of-00002.safetensors), not read yet",
        ),
        (["a/pytorch_model_fsdp.bin"], "a full state dict of accelerate (a/pytorch_model_fsdp.bin), not read yet"),
        (["pytorch_model_fsdp_0_rank1.bin"], "rank files of accelerate (pytorch_model_fsdp_0_rank1.bin), not read yet"),
        (["ep1-ba5/ep1-ba5-rank0.pt"], "rank files (ep1-ba5/ep1-ba5-rank0.pt), not read yet"),
        (
            [DEEPSPEED, "last.ckpt"],
            f"a checkpoint of DeepSpeed ({DEEPSPEED}), not read yet, a file of torch.save (last.ckpt), not read yet",
        ),
    ],
    ids=["empty", "others", "verl", "safetensors", "accelerate", "accelerate ranks", "composer", "deepspeed"],
)
def test_what_is_there_instead_is_said(files: list[str], found: str, tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"no sharded checkpoint in {tmp_path}: expected .metadata and *.distcp files there or up to 4 levels below, "
        f"found {found}. {WAY_OUT}"
    )


def test_a_checkpoint_five_levels_below_is_not_looked_for(tmp_path: Path) -> None:
    make(tmp_path, "a/b/c/d/e")
    with pytest.raises(NotFoundError, match="no sharded checkpoint"):
        find_checkpoint(tmp_path)


def test_optimizers_alone_are_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-5/optimizer_0", "checkpoint-6/optimizer_0")
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"only optimizer state in {tmp_path}: found checkpoint-5/optimizer_0, checkpoint-6/optimizer_0. {WAY_OUT}"
    )


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "model.bin")
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path / "model.bin")
    assert str(caught.value) == f"{tmp_path / 'model.bin'} is a file, not a folder. {WAY_OUT}"
    with pytest.raises(NotFoundError) as caught:
        find_checkpoint(tmp_path / "nothing")
    assert str(caught.value) == f"{tmp_path / 'nothing'} does not exist. {WAY_OUT}"


def test_a_part_of_a_checkpoint_that_is_named_gives_its_own_error(tmp_path: Path) -> None:
    make(tmp_path, ".")
    (tmp_path / ".metadata").unlink()
    assert find_checkpoint(tmp_path) == tmp_path
    with pytest.raises(SourceError, match=r"no \.metadata in .* found data files of rank 0"):
        open_source(tmp_path)


def test_a_checkpoint_is_found_and_opened(tmp_path: Path) -> None:
    save(tmp_path / "step-5", {"actor": {"w": torch.arange(3)}, "critic": {"w": torch.zeros(2)}})
    source = open_source(tmp_path, prefix="actor.", ranks=(0, 1), rank=1, device=torch.device("meta"))
    assert source.folder == tmp_path / "step-5"
    assert (source.ranks, source.rank, source.device) == ((0, 1), 1, torch.device("meta"))
    assert source.rows(source.specs[0], 1, 3).is_meta
    assert open_source(tmp_path, prefix="actor.").rows(source.specs[0], 1, 3).tolist() == [1, 2]
