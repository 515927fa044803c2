"""Edits of config files: only the keys that must change, in the text as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_export.config_json import (
    REMOVED,
    Edits,
    class_edits,
    differences,
    dtype_edits,
    edit_json,
    parse_object,
    rope_edits,
    untie_edits,
)

BY_HAND = """{
    "architectures": ["LlamaForCausalLM"],
    "eps" : 1e-05,   "bos":1,
    "text_config": { "dtype": "float16", "layers": [1,
        2] },
    "torch_dtype": "float16",
    "name": "été"
}
"""


@pytest.mark.parametrize(
    ("edits", "old", "new"),
    [
        pytest.param(
            {("torch_dtype",): "bfloat16"}, '"torch_dtype": "float16"', '"torch_dtype": "bfloat16"', id="value"
        ),
        pytest.param({("text_config", "dtype"): None}, '{ "dtype": "float16"', '{ "dtype": null', id="nested"),
        pytest.param({("bos",): [1, 2]}, '"bos":1', '"bos":[\n        1,\n        2\n    ]', id="list-is-indented"),
        pytest.param({("architectures",): ["B"]}, '"LlamaForCausalLM"', '"B"', id="list-on-its-line"),
        pytest.param({("name",): "né"}, '"été"', '"né"', id="unicode-as-in-the-file"),
        pytest.param({("tie",): False}, '"été"\n', '"été",\n    "tie": false\n', id="new-key-comes-last"),
        pytest.param({("bos",): REMOVED}, '"bos":1,\n    ', "", id="removed"),
        pytest.param({("name",): REMOVED}, ',\n    "name": "été"', "", id="last-removed"),
        pytest.param({("nothing",): REMOVED}, "", "", id="absent-removed"),
    ],
)
def test_an_edit_changes_nothing_else(edits: Edits, old: str, new: str) -> None:
    assert edit_json(BY_HAND, edits) == BY_HAND.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        pytest.param("{}\n", {("a",): 1}, '{"a": 1}\n', id="empty-object"),
        pytest.param('{"a":1}', {("a",): REMOVED}, "{}", id="only-key"),
        pytest.param('{"a":1}', {("b",): {"c": 2}}, '{"a":1,"b": {"c": 2}}', id="one-line"),
        pytest.param('{"a": 1, "b": 2, "a": 3}', {("a",): REMOVED}, '{"b": 2}', id="key-that-stands-twice"),
        pytest.param('{"a": 1, "a": 3}', {("a",): 4}, '{"a": 1, "a": 4}', id="last-of-two-counts"),
        pytest.param('{"é": 1}', {("a",): "\ud800"}, '{"é": 1,"a": "\\ud800"}', id="half-of-a-character"),
        pytest.param('{\r\n\t"a": 1\r\n}', {("b",): 2}, '{\r\n\t"a": 1,\r\n\t"b": 2\r\n}', id="crlf-and-tabs"),
    ],
)
def test_an_edit_of_odd_text(text: str, edits: Edits, expected: str) -> None:
    assert edit_json(text, edits) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    config=st.dictionaries(st.text(max_size=3), JSON, max_size=5),
    key=st.text(max_size=3),
    value=JSON | st.just(REMOVED),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    ensure_ascii=st.booleans(),
)
def test_edited_text_says_what_the_edited_object_says(
    config: dict[str, Any], key: str, value: object, indent: Any, ensure_ascii: bool
) -> None:
    edited = json.loads(edit_json(json.dumps(config, indent=indent, ensure_ascii=ensure_ascii), {(key,): value}))
    expected = {**config, key: value}
    if value is REMOVED:
        del expected[key]
    assert edited == expected
    assert list(edited) == list(expected)


@given(config=st.dictionaries(st.text(max_size=3), JSON, min_size=1, max_size=5), indent=st.sampled_from([None, 2]))
def test_the_text_of_json_dumps_is_met_again(config: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(config, indent=indent)
    assert edit_json(text, {(key,): value for key, value in config.items()}) == text


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        pytest.param({"torch_dtype": "float32"}, torch.bfloat16, {("torch_dtype",): "bfloat16"}, id="old-spelling"),
        pytest.param({"dtype": "float32"}, torch.float16, {("dtype",): "float16"}, id="new-spelling"),
        pytest.param({"dtype": "bfloat16"}, torch.bfloat16, {}, id="true-already"),
        pytest.param({}, torch.float32, {}, id="silence-means-float32"),
        pytest.param({}, torch.bfloat16, {("torch_dtype",): "bfloat16"}, id="silence-would-lie"),
        pytest.param(
            {"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float16"}},
            torch.bfloat16,
            {("dtype",): "bfloat16", ("text_config", "dtype"): "bfloat16"},
            id="parts-that-agreed-follow",
        ),
        pytest.param(
            {"text_config": {"torch_dtype": "float32"}},
            torch.bfloat16,
            {("text_config", "torch_dtype"): "bfloat16"},
            id="said-by-a-part-only",
        ),
        pytest.param(
            {"dtype": "float16", "quantization_config": {"dtype": "float16"}},
            torch.bfloat16,
            {("dtype",): "bfloat16"},
            id="not-that-of-a-quantization",
        ),
        pytest.param({"dtype": None}, torch.float32, {}, id="null"),
    ],
)
def test_dtype_edits(config: dict[str, Any], dtype: torch.dtype, expected: Edits) -> None:
    assert dtype_edits(config, dtype) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"tie_word_embeddings": True}, {("tie_word_embeddings",): False}, id="flag"),
        pytest.param({}, {("tie_word_embeddings",): False}, id="default-may-be-true"),
        pytest.param({"tie_word_embeddings": False}, {}, id="said-already"),
        pytest.param(
            {"tie_word_embeddings": False, "text_config": {}, "decoder": {"tie_word_embeddings": True}},
            {("text_config", "tie_word_embeddings"): False, ("decoder", "tie_word_embeddings"): False},
            id="parts",
        ),
    ],
)
def test_untie_edits(config: dict[str, Any], expected: Edits) -> None:
    assert untie_edits(config) == expected


@pytest.mark.parametrize(
    ("written", "class_name", "expected"),
    [
        pytest.param(["A"], "A", {}, id="true-already"),
        pytest.param(["A"], "B", {("architectures",): ["B"]}, id="another-class"),
        pytest.param(["FSDPA"], None, {("architectures",): ["A"]}, id="wrapped-on-disk"),
        pytest.param(None, None, {}, id="nothing-known"),
        pytest.param(None, "A", {("architectures",): ["A"]}, id="absent"),
        pytest.param(["FSDPA", 3, None], None, {("architectures",): ["A", 3, None]}, id="no-names"),
        pytest.param("FSDPA", None, {}, id="no-list"),
        pytest.param(3, None, {}, id="number"),
    ],
)
def test_class_edits(written: Any, class_name: str | None, expected: Edits) -> None:
    assert class_edits({"architectures": written}, class_name) == expected


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"a": [1, {"b": 2}]}', None),
        (b"[]", "list"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "values nested too deeply"),
        (b'{"a": ' * 100_000, "values nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
    ids=["object", "list", "deep", "very deep", "number"],
)
def test_an_object_of_a_config_is_read_or_refused(data: bytes, found: str | None) -> None:
    if found is None:
        assert parse_object(data) == {"a": [1, {"b": 2}]}
        return
    with pytest.raises(ValueError, match=found):
        parse_object(data)


def test_custom_code_of_fsdp_is_dropped() -> None:
    own = {"AutoConfig": "configuration_my.MyConfig"}
    assert class_edits({"auto_map": own}, None) == {}
    assert class_edits({"auto_map": {**own, "AutoModel": "_fsdp_init.FSDPMy"}}, None) == {("auto_map",): own}
    assert class_edits({"auto_map": {"AutoModel": "_fsdp_init.FSDPMy"}}, None) == {("auto_map",): REMOVED}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {("rope_theta",): 5e5, ("rope_scaling",): None},
            id="default",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            {("rope_theta",): 5e5, ("rope_scaling",): {"rope_type": "llama3", "factor": 8.0}},
            id="scaled",
        ),
        pytest.param(
            {
                "model_type": "gpt_neox",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1, "partial_rotary_factor": 0.5},
            },
            {("rotary_emb_base",): 1, ("rope_scaling",): None, ("rotary_pct",): 0.5},
            id="gpt-neox",
        ),
        pytest.param(
            {
                "text_config": {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    }
                }
            },
            {
                ("text_config", "rope_theta"): 1e6,
                ("text_config", "rope_scaling"): {"rope_type": "linear", "factor": 8},
                ("text_config", "rope_local_base_freq"): 1e4,
            },
            id="by-layer-type-in-a-part",
        ),
        pytest.param({"rope_parameters": {"main": {"rope_theta": 1}}}, {}, id="unknown-to-transformers-4"),
        pytest.param({"rope_parameters": None, "rope_theta": 1}, {}, id="none"),
    ],
)
def test_rope_edits(config: dict[str, Any], expected: Edits) -> None:
    assert rope_edits(config) == expected


@pytest.mark.parametrize(
    ("read", "live", "written", "expected"),
    [
        pytest.param({"a": 1, "use_cache": True, "_x": 1}, {"a": 1, "use_cache": False, "_x": 2}, {}, {}, id="equal"),
        pytest.param({"vocab_size": 8}, {"vocab_size": 9}, {"vocab_size": 8}, {("vocab_size",): 9}, id="changed"),
        pytest.param({"a": 1}, {"a": 1, "b": None}, {"a": 1}, {("b",): None}, id="added"),
        pytest.param({"a": {"bits": 4}}, {}, {"a": {"bits": 4}}, {("a",): REMOVED}, id="gone"),
        pytest.param(
            {"t": {"a": 1, "b": 2}}, {"t": {"a": 1, "b": 3}}, {"t": {"a": 1}}, {("t", "b"): 3}, id="in-a-part"
        ),
        pytest.param({"t": {"a": 1, "b": 2}}, {"t": {"a": 1, "b": 3}}, {}, {("t",): {"a": 1, "b": 3}}, id="new-part"),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
            {"rope_theta": 1.0},
            {
                ("rope_parameters",): {"rope_type": "default", "rope_theta": 2.0},
                ("rope_theta",): 2.0,
                ("rope_scaling",): None,
            },
            id="rope-in-both-spellings",
        ),
    ],
)
def test_differences(read: dict[str, Any], live: dict[str, Any], written: dict[str, Any], expected: Edits) -> None:
    assert differences(read, live, written) == expected
