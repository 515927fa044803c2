"""A plan as people read it."""

import pytest
import torch

from fsdp_export.layout import lay_out
from fsdp_export.spec import TensorInfo
from fsdp_export.table import dtype_name, human_bytes, plan_table, summary

OUTPUTS = [
    TensorInfo("embed.weight", (1000, 16), torch.bfloat16),
    TensorInfo("count", (), torch.int64),
    TensorInfo("empty", (0, 5), torch.float32),
]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (15_231_233_024, "15.2 GB"),
        (999_700_000_000, "1 TB"),
        (1_500_000_000_000_000, "1,500 TB"),
    ],
)
def test_sizes_are_decimal_with_three_digits(num_bytes, text):
    assert human_bytes(num_bytes) == text


def test_a_dtype_has_a_bare_name():
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_a_summary_names_the_commonest_dtype_first():
    assert summary([*OUTPUTS, TensorInfo("more", (1,), torch.float32)]) == (
        "4 tensors, 32 kB, float32 and bfloat16 and int64"
    )
    assert summary(OUTPUTS[1:2]) == "1 tensor, 8 B, int64"
    assert summary([]) == "0 tensors, 0 B, empty"


def test_a_table_has_a_line_for_each_tensor_and_the_totals():
    files = [lay_out("a.safetensors", OUTPUTS[:1]), lay_out("b.safetensors", OUTPUTS[1:])]
    assert plan_table(OUTPUTS, files).splitlines() == [
        "name          shape    dtype      bytes  file",
        "embed.weight  1000x16  bfloat16  32,000  a.safetensors",
        "count         scalar   int64          8  b.safetensors",
        "empty         0x5      float32        0  b.safetensors",
        "3 tensors, 32 kB, bfloat16 and int64 and float32, 2 files",
    ]


def test_a_table_without_files_has_no_column_for_them():
    assert plan_table(OUTPUTS[:1]).splitlines() == [
        "name          shape    dtype      bytes",
        "embed.weight  1000x16  bfloat16  32,000",
        "1 tensor, 32 kB, bfloat16",
    ]
