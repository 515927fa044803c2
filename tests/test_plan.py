"""Every row is delivered by exactly one rank, whatever the meshes and limits."""

import random
import tracemalloc
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from fsdp_export.errors import PlanError
from fsdp_export.plan import Plan, share_out
from fsdp_export.spec import Mesh, Sharding, TensorInfo, TensorSpec
from fsdp_export.steps import Step, Window, copy_step

MESHES = [Mesh((0,), (1,)), Mesh((0, 1), (2,)), Mesh((0, 1, 2, 3), (4,)), Mesh((2, 0, 3, 1), (2, 2))]
MESHES.append(Mesh(tuple(range(12)), (3, 2, 2)))


def random_spec(chance: random.Random, mesh: Mesh, name: str) -> TensorSpec:
    shape = tuple(chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(chance.randint(0, 3)))
    axes = chance.sample(range(len(mesh.shape)), chance.randint(0, len(mesh.shape))) if shape else []
    cuts = tuple((chance.randrange(len(shape)), axis) for axis in axes)
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    return TensorSpec(name, shape, dtype, Sharding(mesh, cuts), is_buffer=not cuts and chance.random() < 0.3)


def random_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    mesh = chance.choice(MESHES)
    specs = [random_spec(chance, mesh, f"t{index}") for index in range(12)]
    dtype = chance.choice([None, torch.bfloat16, torch.float32])
    return Plan(
        tuple(copy_step(s, dtype if s.dtype.is_floating_point else None) for s in specs), tuple(sorted(mesh.ranks))
    )


def random_joint_step(chance: random.Random, mesh: Mesh, name: str) -> Step:
    """Return a step that needs rows of some tensors and all of others, sharded in all kinds of ways."""
    num_units = chance.randint(1, 8)
    specs = [random_spec(chance, mesh, f"{name}.{index}") for index in range(chance.randint(1, 4))]
    by_unit = tuple(
        TensorSpec(spec.name, (num_units, *spec.shape[1:]), spec.dtype, spec.sharding) for spec in specs if spec.shape
    )[: chance.randint(0, 3)]
    names = {spec.name for spec in by_unit}
    whole = tuple(spec for spec in specs if spec.name not in names)
    units = num_units if by_unit else 1
    return Step(by_unit, (TensorInfo(name, (units,), torch.float32),), units, None, lambda *_: (), whole=whole)


def holds(step: Step, unit: int, rank: int) -> bool:
    """Tell, element by element, whether a rank has all that a unit needs."""
    for spec in step.inputs:
        box = spec.sharding.box(spec.shape, rank)
        elements = [range(size) for size in spec.shape]
        if spec.shape:
            elements[0] = range(*step.rows_of(spec, ((unit, unit + 1),))[0])
        held = [range(start, stop) for start, stop in zip(box.start, box.stop, strict=True)]
        if not set(product(*elements)) <= set(product(*held)):
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_units_of_several_inputs_are_delivered_once_by_a_rank_that_holds_all(seed):
    chance = random.Random(seed)
    mesh = chance.choice(MESHES)
    steps = tuple(random_joint_step(chance, mesh, f"s{index}") for index in range(6))
    plan = Plan(steps, tuple(sorted(mesh.ranks)))
    by_rank = {rank: plan.local_windows(rank) for rank in plan.ranks}
    for step in steps:
        delivered = {rank: rows_of(windows, step) for rank, windows in by_rank.items()}
        counted = sum(delivered.values(), Counter())
        if step in plan.gathered_steps:
            assert counted == Counter()
            cut = Counter()
            for bucket in plan.windows([step], chance.choice([1, 50, 10_000]), whole=False):
                cut += rows_of(bucket, step)
            assert cut == Counter(range(step.num_units))
        else:
            assert counted == Counter(range(step.num_units))
            assert all(holds(step, unit, rank) for rank, units in delivered.items() for unit in units)


def rows_of(windows: list[Window], step: Step) -> Counter[int]:
    counted: Counter[int] = Counter()
    for window in windows:
        if window.step is step:
            for first, stop in window.blocks:
                counted.update(range(first, stop))
    return counted


@pytest.mark.parametrize("seed", range(60))
def test_held_rows_are_delivered_once_by_a_holder(seed):
    plan = random_plan(seed)
    by_rank = {rank: plan.local_windows(rank) for rank in plan.ranks}
    for step in plan.steps:
        spec = step.inputs[0]
        delivered = sum((rows_of(windows, step) for windows in by_rank.values()), Counter())
        gathered = step in plan.gathered_steps
        assert delivered == Counter() if gathered else delivered == Counter(range(step.num_units))
        for rank, windows in by_rank.items():
            box = spec.sharding.box(spec.shape, rank)
            assert all(box.rows[0] <= row < box.rows[1] for row in rows_of(windows, step))
            assert not rows_of(windows, step) or box.has_full_rows(spec.shape)
        if spec.is_buffer:
            assert sum(bool(rows_of(windows, step)) for windows in by_rank.values()) <= 1


@pytest.mark.parametrize("max_bytes", [1, 40, 1000])
@pytest.mark.parametrize("seed", range(30))
def test_windows_cover_every_step_once_within_the_bound(seed, max_bytes):
    plan = random_plan(seed)
    buckets = plan.windows(plan.steps, max_bytes, whole=False)
    for step in plan.steps:
        assert rows_of([w for bucket in buckets for w in bucket], step) == Counter(range(step.num_units))
    for bucket in buckets:
        spec = bucket[0].step.inputs[0]
        blocks = len({box.rows for box, _ in spec.sharding.holders(spec.shape)})
        assert sum(w.num_bytes for w in bucket) <= max(max_bytes, bucket[0].step.unit_bytes * blocks)


@pytest.mark.parametrize("seed", range(10))
def test_whole_windows_keep_steps_together_and_in_order(seed):
    plan = random_plan(seed)
    windows = [w for bucket in plan.windows(plan.steps, 100, whole=True) for w in bucket]
    assert [window.step for window in windows] == list(plan.steps)
    assert all(window.num_units == window.step.num_units for window in windows)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(20))
def test_share_out_covers_and_balances(seed, parts):
    chance = random.Random(seed)
    specs = [
        TensorSpec(f"t{i}", (chance.randint(1, 50), 4), torch.float32, Sharding.replicated((0,))) for i in range(9)
    ]
    windows = [Window(copy_step(spec), ((0, spec.num_rows),)) for spec in specs]
    shares = [list(share_out(windows, part, parts)) for part in range(parts)]
    rows = Counter((index, row) for share in shares for index, begin, end in share for row in range(begin, end))
    assert rows == Counter((index, row) for index, spec in enumerate(specs) for row in range(spec.num_rows))
    sizes = [sum(end - begin for _, begin, end in share) for share in shares]
    assert max(sizes) - min(sizes) <= 2


def test_replicas_take_whole_tensors_where_they_can():
    specs = [TensorSpec(f"t{i}", (6, 2), torch.float32, Sharding.replicated((0, 1))) for i in range(4)]
    plan = Plan(tuple(map(copy_step, specs)), (0, 1))
    assert [[w.step.outputs[0].name for w in plan.local_windows(r)] for r in (0, 1)] == [["t0", "t1"], ["t2", "t3"]]


def test_window_part_finds_rows_and_units():
    spec = TensorSpec("t", (10,), torch.float32, Sharding.replicated((0,)))
    window = Window(copy_step(spec), ((1, 3), (5, 8)))
    assert list(window.part(0, 5)) == [(0, (1, 3)), (2, (5, 8))]
    assert list(window.part(1, 4)) == [(1, (2, 3)), (2, (5, 7))]
    assert list(window.part(2, 2)) == []


def test_casts_move_the_fewest_bytes():
    wide = TensorSpec("t", (2,), torch.float32, Sharding.replicated((0,)))
    narrow = TensorSpec("t", (2,), torch.bfloat16, Sharding.replicated((0,)))
    assert copy_step(wide, torch.bfloat16).unit_bytes == copy_step(narrow, torch.float32).unit_bytes == 2


def test_plan_refuses_two_outputs_of_one_name():
    spec = TensorSpec("t", (2,), torch.float32, Sharding.replicated((0,)))
    with pytest.raises(PlanError, match="planned twice for 't'"):
        Plan((copy_step(spec), copy_step(spec)))


@pytest.mark.parametrize("num_ranks", [2, 1024])
def test_many_tensors_take_little_memory_whatever_the_number_of_ranks(num_ranks):
    sharding = Sharding(Mesh(tuple(range(num_ranks)), (num_ranks,)), ((0, 0),))
    specs = [TensorSpec(f"t{i}", (num_ranks, 4), torch.float32, sharding) for i in range(5000)]
    tracemalloc.start()
    plan = Plan(tuple(map(copy_step, specs)), sharding.mesh.ranks)
    assert plan.digest
    kept = plan.local_windows(0), plan.buckets(1 << 30, whole=True, held=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[0]) == len(kept[1][0].windows) == len(specs)
    assert peak < 1200 * len(specs)


def test_digest_changes_with_everything_that_must_agree():
    def digest(**changes: Any) -> str:
        facts: dict[str, Any] = {"name": "t", "shape": (4, 2), "dtype": torch.float32}
        facts["sharding"] = Sharding(MESHES[1], ((0, 0),))
        return Plan((copy_step(TensorSpec(**{**facts, **changes})),)).digest

    changed = [
        digest(name="u"),
        digest(shape=(2, 4)),
        digest(dtype=torch.float16),
        digest(sharding=Sharding(MESHES[1], ((1, 0),))),
        digest(sharding=Sharding(MESHES[2], ((0, 0),))),
        digest(is_buffer=True),
    ]
    assert len({digest(), *changed}) == 7
