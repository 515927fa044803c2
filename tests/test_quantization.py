"""Which tensors hold quantized weights."""

from __future__ import annotations

import pytest
import torch

from fsdp_export.quantization import are_packed
from fsdp_export.spec import TensorInfo


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        pytest.param((4, 4), torch.bfloat16, False, id="bf16"),
        pytest.param((4, 4), torch.float8_e4m3fn, True, id="fp8"),
        pytest.param((4, 4), torch.uint8, True, id="bitsandbytes-mxfp4"),
        pytest.param((4, 4), torch.int8, True, id="int8"),
        pytest.param((4, 4), torch.int32, True, id="gptq-awq"),
        pytest.param((4,), torch.uint8, False, id="flat-buffer"),
        pytest.param((1, 4), torch.int64, False, id="position-ids"),
        pytest.param((1, 4), torch.bool, False, id="mask"),
        pytest.param((4, 4), torch.complex64, False, id="complex"),
    ],
)
def test_packed_weights_are_known_by_dtype_and_dims(shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    assert are_packed([TensorInfo("w", (4, 4), torch.float32), TensorInfo("x", shape, dtype)]) is expected
