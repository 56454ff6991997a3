"""Precision of the network's arithmetic; parameters, losses and sums stay in fp32."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

# Each precision in the words of Lightning's trainer.
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# Number formats of autocast; the other precisions store fp32.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device_type: str) -> None:
    """Refuse a precision that the device lacks.

    Raises:
        ValueError: If the precision is unknown, or needs a GPU and the device is none.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {tuple(PRECISIONS)}, got {precision!r}")
    if device_type == "cpu" and precision == "fp16":
        raise ValueError(
            "precision fp16 needs a GPU and its loss scaling, but the device is cpu: use bf16"
        )
    if device_type == "cpu" and precision == "tf32":
        raise ValueError(
            "precision tf32 is a format of NVIDIA's GPUs, but the device is cpu: use fp32 or bf16"
        )


def autocast(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Make the context in which a network computes.

    Half precision means autocast: convolutions in half, parameters in fp32. `fp32` and `tf32`
    change nothing here.

    Raises:
        ValueError: See `check_precision`.
    """
    check_precision(precision, device_type)
    if precision not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(device_type, HALF[precision])


def inference_precision(trained: str, device_type: str) -> str:
    """Choose the precision in which a trained network runs.

    A CPU has no fp16, and runs fp32 where it only emulates bf16: with AVX2 alone torch leaves its
    fast kernels, and a network takes several times as long as in fp32.

    Args:
        trained: Precision of the training.
        device_type: `cpu` or `cuda`.

    Returns:
        The precision of the training, or `fp32` where the device lacks it.
    """
    if device_type != "cpu" or trained == "fp32":
        return trained
    return "bf16" if trained == "bf16" and has_fast_bf16() else "fp32"


def has_fast_bf16() -> bool:
    """Whether torch's convolution kernels support bf16 on this processor.

    Torch itself decides by the same call.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lightning_precision(precision: str, device_type: str) -> str:
    """Name a precision in the words of Lightning's trainer.

    Its `16-mixed` would silently mean bf16 on a CPU, so the device is checked.

    Raises:
        ValueError: See `check_precision`.
    """
    check_precision(precision, device_type)
    return PRECISIONS[precision]


def set_tf32(precision: str) -> None:
    """Allow TF32 in matrix products and convolutions for `tf32` only.

    Torch's default allows it in convolutions.
    """
    _allow_tf32(precision == "tf32", precision == "tf32")


@contextlib.contextmanager
def tf32_as(precision: str) -> Iterator[None]:
    """Set TF32 for a precision and restore it.

    The switch belongs to the process, which may be training as well.
    """
    in_products = torch.backends.cuda.matmul.allow_tf32
    in_convolutions = torch.backends.cudnn.allow_tf32
    set_tf32(precision)
    try:
        yield
    finally:
        _allow_tf32(in_products, in_convolutions)


def _allow_tf32(in_products: bool, in_convolutions: bool) -> None:
    # Lightning asks torch for one precision of all backends, which only this function sets.
    torch.set_float32_matmul_precision("high" if in_products else "highest")
    torch.backends.cudnn.allow_tf32 = in_convolutions
