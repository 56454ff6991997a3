"""Instruction set of oneDNN in processes that train: without AMX.

A backward pass with AMX writes beyond its buffers.

Choice of 2026-11-24. On processors with AMX, oneDNN 3.12 (of torch 2.13.0) computes the gradient of
a convolution's weights in bf16 by `brgemm_convolution_bwd_weights_t`. For flat images, such as
8×88×96 voxels with 8 or 16 channels, it transposes the image into a buffer that is too small: the
training ends by "double free or corruption", or goes on with overwritten tensors. Guard pages
behind each block showed the writes, for kernels of size 1 and 3; the same shapes stay within their
memory with AVX-512, and in fp32. Alternatives: a list of safe shapes (the coarse stage has other
shapes in each step), matrix products for kernels of size 1 (size 3 remains), fp32 (slower still).
Consequence: a step of the fine stage (patches of 128×160×160, bf16) takes 0.71 s instead of 0.46 s
on the same processor with AMX. Prediction has no backward pass and keeps AMX. If you know that your
patches are safe, set `ONEDNN_MAX_CPU_ISA=DEFAULT`. `tests/memory/test_instructions.py` fails on
such a processor without this module. Remove the module once that test passes without it on a newer
torch.
"""

import os

# oneDNN knows its variable by two names.
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_AMX = "AVX512_CORE_FP16"  # the largest set without AMX; processors with less keep theirs


def train_without_amx() -> None:
    """Limit oneDNN in this process and those that it starts; a limit of the user stays.

    Must come before the first convolution.
    """
    has_limit = any(name in os.environ for name in VARIABLES)
    if not has_limit:
        os.environ[VARIABLES[0]] = WITHOUT_AMX


def instruction_limit() -> str:
    """The limit of oneDNN's instruction set in this process; empty without one."""
    for name in VARIABLES:
        if name in os.environ:
            return os.environ[name]
    return ""
