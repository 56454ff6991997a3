"""Precision of the network's arithmetic; parameters, losses and sums stay in fp32."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

# Each precision by its name in Lightning's trainer, which has none for TF32: see `set_tf32`.
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# Number formats of autocast; the other precisions store fp32.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The first compute capability of NVIDIA's GPUs with arithmetic in bf16: A100, RTX 30xx. A T4 or an
# RTX 20xx (7.5) stores bf16, but its convolutions are slow and take more memory, or fail.
BF16_CAPABILITY = (8, 0)


def check_precision(precision: str, device_type: str) -> None:
    """Refuse a precision that the device lacks.

    Args:
        precision: A key of `PRECISIONS`.
        device_type: `cpu` or `cuda`.

    Raises:
        ValueError: If the precision is unknown, or needs a GPU and the device is a CPU.
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

    For `bf16` and `fp16` that is torch's autocast: convolutions in half precision, parameters in
    fp32. For `fp32` and `tf32` the context does nothing; see `set_tf32`.

    Raises:
        ValueError: See `check_precision`.
    """
    check_precision(precision, device_type)
    if precision not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(device_type, HALF[precision])


def inference_precision(trained: str, device_type: str) -> str:
    """Choose the precision in which a trained network runs.

    On a CPU that is bf16 or fp32. Where the processor only emulates bf16, it is fp32: with AVX2
    alone torch has no fast kernels in bf16, and a network takes several times as long as in fp32.

    Args:
        trained: Precision of the training.
        device_type: `cpu` or `cuda`.

    Returns:
        The precision of the training. Where the device lacks it, `fp16` on a GPU and `fp32` on a
        CPU.
    """
    if device_type != "cpu":
        return supported_precision(trained, device_type)
    if trained == "bf16" and has_fast_bf16("cpu"):
        return "bf16"
    return "fp32"


def supported_precision(precision: str, device_type: str) -> str:
    """Replace `bf16` by `fp16` where a GPU has no arithmetic in bf16; keep all other precisions.

    Training in `fp16` scales the loss, see `lightning_precision`.
    """
    if precision == "bf16" and device_type == "cuda" and not has_fast_bf16("cuda"):
        return "fp16"
    return precision


def has_fast_bf16(device_type: str) -> bool:
    """Whether this machine's devices of a type compute in bf16, and do not emulate it.

    All visible GPUs must, because the ranks of a run must agree. On a machine without a GPU the
    answer for `cuda` is True: a run may be planned there for a GPU that it lacks.
    """
    if device_type == "cuda":
        for number in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(number) < BF16_CAPABILITY:
                return False
        return True
    has_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if not has_onednn:
        return False
    # Torch chooses its kernels for bf16 by the same call.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lightning_precision(precision: str, device_type: str) -> str:
    """Return the name of a precision in Lightning's trainer.

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
    # "high" allows TF32 in matrix products, "highest" computes them in fp32.
    if precision == "tf32":
        _set_precision("high", in_convolutions=True)
    else:
        _set_precision("highest", in_convolutions=False)


@contextlib.contextmanager
def tf32_as(precision: str) -> Iterator[None]:
    """Set TF32 for a precision, and restore the former setting at the end.

    The setting is one of the whole process, which may be training as well.
    """
    product_precision = _product_precision()
    in_convolutions = torch.backends.cudnn.allow_tf32
    set_tf32(precision)
    try:
        yield
    finally:
        _set_precision(product_precision, in_convolutions=in_convolutions)


def _product_precision() -> str:
    """Precision of matrix products: `highest`, `high` or `medium`."""
    try:
        return torch.get_float32_matmul_precision()
    # Torch fails if a program has set the precision of single backends: CUDA's setting counts then.
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.allow_tf32 else "highest"


def _set_precision(of_products: str, in_convolutions: bool) -> None:
    """Set the precision of matrix products, and whether convolutions may use TF32.

    Args:
        of_products: `highest`, `high` or `medium`, see `torch.set_float32_matmul_precision`.
        in_convolutions: Whether cuDNN may use TF32.
    """
    # Not `matmul.allow_tf32`, which sets a single backend: Lightning's GPU accelerator calls
    # `torch.get_float32_matmul_precision`, which fails where the backends differ.
    torch.set_float32_matmul_precision(of_products)
    torch.backends.cudnn.allow_tf32 = in_convolutions
