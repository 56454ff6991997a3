"""Keys of the group `memory`, and the devices and number formats that they choose from."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.knob import Knob

CompileMode = StrEnum("CompileMode", ["default", "reduce_overhead", "max_autotune"])
Precision = StrEnum("Precision", ["fp32", "tf32", "bf16", "fp16"])
Accelerator = StrEnum("Accelerator", ["auto", "cpu", "gpu"])


@dataclass
class MemoryOptions:
    """Switches that are applied to the network from outside."""

    precision: Annotated[
        Precision,
        Knob(
            "Number format of forward and backward pass; weights stay fp32. tf32, fp16: GPU only."
        ),
    ]
    checkpointing: Annotated[
        Any,
        Knob(
            "Blocks recomputed in the backward pass: none, sqrt, all, or a [list] of block names.",
            neutral=True,
        ),
    ]
    accumulate: Annotated[
        int,
        Knob(
            "Micro-batches per optimiser step and rank.", "[1, inf)", "micro-batches", neutral=True
        ),
    ]
    offload: Annotated[bool, Knob("Keep saved activations in host memory (GPU).", neutral=True)]
    channels_last: Annotated[bool, Knob("Channels-last memory layout.", neutral=True)]
    compile: Annotated[
        bool,
        Knob(
            "Compile the network with torch.compile, "
            "for variable sizes where crops differ in size.",
            neutral=True,
        ),
    ]
    cudnn_benchmark: Annotated[
        bool, Knob("Search the fastest kernels at each new shape (GPU).", neutral=True)
    ]
    budget_gib: Annotated[
        float | None,
        Knob(
            "Memory that a training step and a validation may use; `plan` checks it.",
            "(0, inf)",
            "GiB",
            neutral=True,
        ),
    ]
    compile_mode: Annotated[
        CompileMode,
        Knob(
            "Mode of torch.compile: reduce_overhead uses CUDA graphs, "
            "max_autotune searches kernels.",
            neutral=True,
        ),
    ] = CompileMode.default

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each contradiction that shows without knowing the network.

        The argument, the key of the group, is not used: the sentences name `memory` themselves.
        """
        policy = self.checkpointing
        is_list_of_names = False
        if isinstance(policy, list):
            is_list_of_names = all(isinstance(name, str) for name in policy)
        # The names themselves can only be checked against a network, see `select_blocks`.
        is_known = policy in ("none", "sqrt", "all") or is_list_of_names
        if not is_known:
            yield (
                "memory.checkpointing: expected none, sqrt, all or a [list] of block names, "
                f"but got {policy}"
            )
