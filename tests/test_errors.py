"""Errors: which of them mean that memory ran out."""

from __future__ import annotations

import pytest
import torch

from medseg.errors import is_out_of_memory

MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("can't start new thread"),
    RuntimeError("could not create a primitive"),
]
OTHERS = [
    ValueError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    OSError(28, "No space left on device"),
    RuntimeError("could not create a primitive descriptor for a convolution"),
]


@pytest.mark.parametrize("error", MEMORY, ids=repr)
def test_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_something_else_went_wrong(error: BaseException) -> None:
    assert not is_out_of_memory(error)
