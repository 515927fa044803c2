"""Mutated and hostile inputs give a right result or one of our errors. `bin/fuzz` makes more of them."""

from pathlib import Path

import pytest
from fuzz.bombs import BOMBS, Maker
from fuzz.check import read_source
from fuzz.fuzzer import fuzz, isolated
from fuzz.limits import MAX_EXTRA_BYTES, guarded, watched

from fsdp_export import export_checkpoint
from fsdp_export.errors import ExportError
from fsdp_export.sources.detect import open_source

NUM_INPUTS = 300
MAX_MESSAGE = 10_000


def test_mutated_inputs_give_a_right_result_or_one_of_our_errors() -> None:
    outcome = fuzz(range(NUM_INPUTS), seed=0)
    assert not outcome.failures, f"bin/fuzz --seed 0 --only {outcome.failures[0].number}: {outcome.failures[0].what}"
    assert sum(outcome.counts.values()) == NUM_INPUTS
    assert outcome.counts["refused"] > NUM_INPUTS / 4
    assert outcome.counts["unchanged"] > NUM_INPUTS / 10


@pytest.mark.parametrize(("make", "is_refused"), BOMBS, ids=[make.__name__ for make, _ in BOMBS])
def test_a_small_input_takes_little(make: Maker, is_refused: bool, tmp_path: Path) -> None:
    make(tmp_path / "ckpt")
    is_like = isolated(_read_and_export, tmp_path)
    assert is_like == ("refused" if is_refused else "read")


def _read_and_export(folder: Path) -> str:
    with guarded() as growth, watched(folder) as events:
        verdict = "read"
        try:
            read_source(open_source(folder / "ckpt"))
            export_checkpoint(folder / "ckpt", folder / "out", fsync=False)
        except ExportError as error:
            verdict = "refused" if len(str(error)) < MAX_MESSAGE else "a message without end"
    assert not events
    assert growth[0] < MAX_EXTRA_BYTES
    return verdict
