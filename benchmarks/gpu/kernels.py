"""Numerics part of the GPU report: convolutions in half precision against fp32.

Outputs and gradients are compared, and the output of an input with more than 2³¹ elements.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from medseg.memory.precision import HALF, supported_precision, tf32_as

# Channels and edge in voxels: levels of the networks from the finest to the deepest.
LEVELS = ((16, 160), (32, 96), (64, 64), (256, 16))
SMALL_LEVELS = ((4, 12), (8, 8))
# Channels and shape with more than 2**31 elements, where indices of 32 bits overflow: libraries had
# kernels with wrong results there. A rehearsal uses SMALL_LARGE instead.
LARGE = (32, (450, 400, 400))
SMALL_LARGE = (2, (12, 16, 16))
# Largest relative error: a few roundings to 8 (bf16) or 11 (fp16) significant bits, each of at most
# 2**-8 = 0.0039 or 2**-11 = 0.0005 of the value.
BOUNDS = {"bf16": 0.01, "fp16": 0.0025}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}


def measure(session: Session) -> Report:
    """Compare each level, format and layout, and one large input."""
    report = Report()
    levels = SMALL_LEVELS if session.is_rehearsal else LEVELS
    # The reference must be true fp32: TF32 has the 11 bits of fp16.
    with tf32_as("fp32"):
        for precision, dtype in HALF.items():
            if supported_precision(precision, session.device.type) != precision:
                report.not_run(precision, "this GPU has no arithmetic in it")
                continue
            for channels, edge in levels:
                for layout, memory_format in LAYOUTS.items():
                    name = f"{precision}, {channels} channels, {edge}³, {layout}"
                    errors = errors_of_level(channels, edge, dtype, memory_format, session.device)
                    for result, error in errors.items():
                        report.at_most(f"{name}: {result}", error, BOUNDS[precision], ".5f")
            check_large_input(report, precision, dtype, session)
    report.texts.append("Errors are relative: the norm of the difference by the norm in fp32.\n")
    return report


def errors_of_level(
    channels: int,
    edge: int,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    device: torch.device,
) -> dict[str, float]:
    """Relative errors of a convolution and its gradients against fp32 on the same numbers.

    Args:
        channels: Channels of input and output.
        edge: Voxels along each axis of the image.
        dtype: Half precision.
        memory_format: Layout of image and weight.
        device: Where both are computed.

    Returns:
        Errors of `output`, `gradient of the image` and `gradient of the weight`, by these names.
    """
    image, weight = random_operands(channels, (edge, edge, edge), dtype, device)
    image = image.contiguous(memory_format=memory_format)
    weight = weight.contiguous(memory_format=memory_format)
    # The output has the shape of the image, and so has its gradient.
    output_gradient = torch.randn_like(image)
    halves = results_of(image, weight, output_gradient)
    # The rounded numbers in fp32, so that only the arithmetic differs.
    singles = results_of(image.float(), weight.float(), output_gradient.float())
    names = ("output", "gradient of the image", "gradient of the weight")
    errors = {}
    for name, half, single in zip(names, halves, singles, strict=True):
        errors[name] = relative_error(half, single)
    return errors


def random_operands(
    channels: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make an image (1, C, D, H, W) and a weight (C, C, 3, 3, 3) whose output has variance 1."""
    torch.manual_seed(0)
    image = torch.randn(1, channels, *shape, device=device, dtype=dtype)
    weight = torch.randn(channels, channels, 3, 3, 3, device=device)
    # Each output value sums 27 · C products of unit variance.
    weight = weight / (27 * channels) ** 0.5
    return image, weight.to(dtype)


def results_of(
    image: Tensor, weight: Tensor, output_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of a convolution and the gradients of its image and weight."""
    image = image.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    output = F.conv3d(image, weight, padding=1)
    of_image, of_weight = torch.autograd.grad(output, (image, weight), output_gradient)
    return output.detach(), of_image, of_weight


def relative_error(half: Tensor, single: Tensor) -> float:
    """Norm of the difference divided by the norm of the result in fp32."""
    return float((half.float() - single).norm() / single.norm())


def check_large_input(report: Report, precision: str, dtype: torch.dtype, session: Session) -> None:
    """Compare three planes of a large output, near its start, middle and end, with fp32.

    The whole output in fp32 would need twice the memory of the output in half precision.
    """
    channels, shape = SMALL_LARGE if session.is_rehearsal else LARGE
    shape_text = "×".join(map(str, shape))
    name = f"{precision}, {channels} channels, {shape_text}: planes of the output"
    # Image and output, and as much again for the library's workspace.
    image_bytes = channels * shape[0] * shape[1] * shape[2] * dtype.itemsize
    needed_bytes = 4 * image_bytes
    if not session.is_rehearsal:
        free_bytes, _ = torch.cuda.mem_get_info()
        if free_bytes < needed_bytes:
            report.not_run(name, f"needs {needed_bytes / 2**30:.0f} GiB of the GPU")
            return
    with torch.no_grad():
        image, weight = random_operands(channels, shape, dtype, session.device)
        output = F.conv3d(image, weight, padding=1)
        worst_error = 0.0
        # The outermost planes see padding, so their neighbours are taken.
        for plane in (1, shape[0] // 2, shape[0] - 2):
            # A plane of the output depends on three planes of the image.
            slab = image[:, :, plane - 1 : plane + 2].float()
            expected = F.conv3d(slab, weight.float(), padding=(0, 1, 1))
            error = relative_error(output[:, :, plane : plane + 1], expected)
            worst_error = max(worst_error, error)
    report.at_most(name, worst_error, BOUNDS[precision], ".5f")
