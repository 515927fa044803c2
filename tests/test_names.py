"""Wrapper segments and patterns."""

import pytest

from fsdp_export.errors import NotFoundError, PlanError, UsageError
from fsdp_export.names import check_unique, select, strip_wrappers

NAMES = ["embed_tokens.weight", "pos_embedder.weight", "embedding_norm.weight", "layers.0.mlp.up.weight", "bias"]


@pytest.mark.parametrize(
    ("raw", "ddp_modules", "clean"),
    [
        ("layers.0._orig_mod.lin.weight", [], "layers.0.lin.weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.w", [], "layers.0.w"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.w", [], "a.w"),
        ("module.a.w", [""], "a.w"),
        ("module.module.w", [""], "module.w"),
        ("module.a.w", [], "module.a.w"),
        ("_orig_mod.module.w", ["_orig_mod"], "w"),
        ("module.tower.module.w", ["", "module.tower"], "tower.w"),
        ("tower.module.w", ["tower"], "tower.w"),
        ("my_orig_mod.w", [], "my_orig_mod.w"),
        ("", [], ""),
    ],
)
def test_strip_wrappers(raw, ddp_modules, clean):
    assert strip_wrappers(raw, ddp_modules) == clean


def test_names_that_no_file_can_hold():
    with pytest.raises(PlanError, match="planned twice for 'a'"):
        check_unique(["a", "b", "a"])
    with pytest.raises(PlanError, match="reserved name for '__metadata__'"):
        check_unique(["__metadata__"])


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ([], [], NAMES),
        ([], ["embed_tokens"], NAMES[1:]),
        (["layers.0"], [], ["layers.0.mlp.up.weight"]),
        (["*.weight"], ["embed*"], ["pos_embedder.weight", "layers.0.mlp.up.weight"]),
        (["weight"], ["mlp"], NAMES[:3]),
    ],
)
def test_select(include, exclude, left):
    names, hits = select(NAMES, include, exclude)
    assert names == left
    assert set(hits) == {*include, *exclude}
    assert all(hits.values())


def test_select_refuses_what_has_no_effect():
    with pytest.raises(UsageError, match="'embed' matches none of 5 tensors"):
        select(NAMES, [], ["embed"])
    with pytest.raises(NotFoundError, match="no tensor is left of 5"):
        select(NAMES, ["bias"], ["bias"])
