"""Kernel costs: workspaces by hand, parts of large operations, and the file that keeps them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg import console
from medseg.io import calibration
from medseg.memory import kernels
from medseg.memory.kernels import Cost, KernelCosts, Part, Run, extrapolated_bytes, parts_of
from medseg.memory.tracker import Call, Operand

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let costs measured under the load of other programs count until the end of a test."""
    monkeypatch.setattr(kernels, "present_load", lambda: 1.0)


def operand(*shape: int, dtype: torch.dtype = torch.float32) -> Operand:
    return Operand(shape, torch.empty(shape, device="meta").stride(), dtype)


def convolution(depth: int, channels: int = 1, size: int = 12) -> Call:
    image, weight = operand(1, channels, depth, size, size), operand(2, channels, 3, 3, 3)
    return Call(
        aten.convolution.default,
        (image, weight, None, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
        {},
    )


def measured(folder: Path, **calls: Call) -> KernelCosts:
    costs = KernelCosts(folder, CPU)
    costs.measure(calls)
    return costs


def test_the_workspace_of_a_convolution_of_one_channel_is_its_matrix_of_columns(
    tmp_path: Path,
) -> None:
    """Torch's own convolution writes the 27 neighbours of each voxel into a matrix."""
    cost = measured(tmp_path, small=convolution(12))["small"]
    assert cost.workspace == 27 * 12**3 * 4
    assert 0 < cost.seconds < 5


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell the largest resident memory anew"
)
def test_what_a_kernel_does_not_write_of_its_workspace_is_not_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        """Writes a quarter of a 256 MiB workspace, in large or small blocks; a result of 64 MiB."""

        _schema = SimpleNamespace(is_mutable=False)

        def __init__(self, num_blocks: int) -> None:
            self.num_blocks = num_blocks

        def __call__(self) -> torch.Tensor:
            result = torch.ones(2**26, dtype=torch.uint8)
            blocks = [
                torch.empty(2**28 // self.num_blocks, dtype=torch.uint8)
                for _ in range(self.num_blocks)
            ]
            for block in blocks:
                block[: len(block) // 4].fill_(1)
            return result

    costs = KernelCosts(tmp_path, CPU)
    # Blocks of 1 MiB come from the heap.
    calls: dict[str, Any] = {f"{num}": Call(Kernel(num), (), {}) for num in (1, 2**8)}
    monkeypatch.setattr(kernels, "maps_large_blocks", lambda: True)
    for run in costs._watched(calls).values():
        assert run.workspace == 2**28
        assert run.written_share == pytest.approx(0.25, abs=0.1)
    monkeypatch.setattr(kernels, "maps_large_blocks", lambda: False)
    for run in costs._watched(calls).values():
        assert run.written_share == 1.0, "blocks of a heap may be resident before"


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell the largest resident memory anew"
)
def test_a_matrix_of_columns_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "maps_large_blocks", lambda: True)
    monkeypatch.setattr(
        kernels,
        "reset_peak_resident",
        lambda reset=kernels.reset_peak_resident: resets.append(reset()),
    )
    resets: list[None] = []
    # Its columns take 40 MB: smaller blocks come from the heap, see `conftest.py`.
    cost = measured(tmp_path, large=convolution(64, size=72))["large"]
    assert cost.workspace > 2**25
    assert cost.written == pytest.approx(cost.workspace, rel=0.05)
    assert resets, "it was measured"


def test_an_operation_that_allocates_its_result_alone_has_no_workspace(tmp_path: Path) -> None:
    costs = measured(tmp_path, sum=Call(aten.add.Tensor, (operand(3, 5), operand(3, 5)), {}))
    assert costs["sum"].workspace == 0
    assert costs["sum"].seconds > 0


def test_a_large_operation_is_continued_from_parts_of_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(tmp_path / "whole", large=convolution(64))["large"]
    monkeypatch.setattr(kernels, "MEASURED_BYTES", 64 * 12 * 12 * 4 // 4)
    parts = parts_of(convolution(64), kernels.MEASURED_BYTES)
    assert [
        (share, part.arguments[0].shape[2], part.arguments[1].shape) for share, part in parts
    ] == [
        (1 / 8, 8, (2, 1, 3, 3, 3)),
        (1 / 4, 16, (2, 1, 3, 3, 3)),
    ]
    assert measured(tmp_path / "parts", large=convolution(64))["large"].workspace == whole.workspace


def test_a_gpu_measures_whole_what_a_cpu_divides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(total_memory=8 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    call = convolution(64, size=512)
    on_cpu = KernelCosts(tmp_path, torch.device("cpu"))._measured_bytes()
    on_gpu = KernelCosts(tmp_path, torch.device("cuda"))._measured_bytes()
    assert len(parts_of(call, on_cpu)) == 2
    assert parts_of(call, on_gpu) == [Part(1.0, call)]


def group_norm(depth: int) -> Call:
    image, scale = operand(1, 4, depth, 16, 16), operand(4)
    arguments = (image, scale, scale, 1, 4, depth * 16 * 16, 2, 1e-5)
    return Call(aten.native_group_norm.default, arguments, {})


def group_norm_backward(depth: int) -> Call:
    image, scale, statistics = operand(1, 4, depth, 16, 16), operand(4), operand(1, 2)
    num_voxels = depth * 16 * 16
    arguments = (image, image, statistics, statistics, scale, 1, 4, num_voxels, 2, [True] * 3)
    return Call(aten.native_group_norm_backward.default, arguments, {})


@pytest.mark.parametrize(
    "call",
    [
        Call(
            aten.upsample_nearest3d.default,
            (operand(1, 4, 32, 8, 8), [64, 16, 16], 2.0, 2.0, 2.0),
            {},
        ),
        Call(aten.leaky_relu_.default, (operand(1, 8, 64, 16, 16), 0.01), {}),
        group_norm(64),
        group_norm_backward(64),
    ],
)
def test_sizes_among_the_arguments_follow_the_slices(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "MEASURED_BYTES", 2**14)
    share, part = parts_of(call, kernels.MEASURED_BYTES)[-1]
    assert share < 1
    assert part.arguments[0].shape[2] == round(share * call.arguments[0].shape[2])
    # Torch refuses an operation whose sizes contradict those of its tensors.
    costs = measured(tmp_path, one=call)
    assert not costs.unmeasured


def test_bytes_lie_on_a_line_of_the_share() -> None:
    assert extrapolated_bytes([(1.0, 7)]) == 7
    assert extrapolated_bytes([(0.25, 100)]) == 400
    assert extrapolated_bytes([(0.25, 150), (0.5, 200)]) == 300  # 100 that do not grow, and 200


def test_strides_of_a_part_keep_their_order() -> None:
    last = torch.empty((1, 8, 2048, 64, 64), device="meta").to(memory_format=torch.channels_last_3d)
    call = Call(
        aten.leaky_relu.default,
        (Operand(tuple(last.shape), last.stride(), torch.float32), 0.01),
        {},
    )
    _, part = parts_of(call, kernels.MEASURED_BYTES)[-1]
    shape = part.arguments[0].shape
    expected = torch.empty(shape, device="meta").to(memory_format=torch.channels_last_3d)
    assert shape[2] < 2048
    assert part.arguments[0].stride[1:] == expected.stride()[1:]


def test_what_was_measured_is_read_again_and_a_damaged_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(tmp_path, small=convolution(12))
    monkeypatch.setattr(KernelCosts, "_watched", lambda *_: pytest.fail("measured again"))
    assert measured(tmp_path, small=convolution(12))["small"] == first["small"]
    monkeypatch.undo()
    first.path.write_text('{"small": [', encoding="utf-8")
    assert measured(tmp_path, small=convolution(12))["small"].workspace == first["small"].workspace


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert measured(tmp_path / "file", small=convolution(12))["small"].workspace > 0


def test_an_operation_that_cannot_run_alone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: Any = Call(aten.add.Tensor, (operand(3, 5), operand(4, 7)), {})
    costs = measured(tmp_path, wrong=wrong)
    (reason,) = costs.unmeasured.values()
    assert list(costs.unmeasured) == ["aten.add.Tensor"]
    assert "must match" in reason
    assert costs["wrong"] == kernels.NOTHING
    assert f"aten.add.Tensor could not be measured and counts as nothing: {reason}" in (
        capsys.readouterr().err
    )


class FailingKernel:
    """An operation that raises an error, and counts its calls."""

    _schema = SimpleNamespace(is_mutable=False)

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        raise self.error

    def __str__(self) -> str:
        return "failing kernel"


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that reserves nothing; its waits are noted."""
    waits: list[str] = []
    card = SimpleNamespace(total_memory=8 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
    monkeypatch.setattr(kernels, "start_libraries", lambda _: None)
    return waits


GPU = torch.device("cuda")


def test_workspaces_on_a_gpu_are_read_after_each_operation(
    tmp_path: Path, pretended_gpu: list[str]
) -> None:
    operation: Any = lambda: torch.zeros(1)  # noqa: E731
    operation._schema = SimpleNamespace(is_mutable=False)
    costs = KernelCosts(tmp_path, GPU)
    run = costs._watched_on_gpu({"a": Call(operation, (), {})})["a"]
    assert (run.workspace, run.written_share) == (400, 1.0)
    assert pretended_gpu == ["wait"]
    costs._lasting({"a": Call(operation, (), {})})
    assert pretended_gpu == ["wait", "wait"], "a failure belongs to the operation that made it"


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried", "no kernel for these sizes"])
def test_an_operation_that_a_gpu_refuses_is_named_with_its_reason(
    text: str, tmp_path: Path, pretended_gpu: list[str]
) -> None:
    kernel: Any = FailingKernel(RuntimeError(text))
    costs = KernelCosts(tmp_path, GPU)
    costs.measure({"a": Call(kernel, (), {})})
    assert costs.unmeasured == {"failing kernel": text}


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), KeyError("x")]
)
def test_a_gpu_that_fails_and_a_defect_of_ours_end_the_plan(
    error: Exception, tmp_path: Path, pretended_gpu: list[str]
) -> None:
    kernel: Any = FailingKernel(error)
    with pytest.raises(type(error)):
        KernelCosts(tmp_path, GPU).measure({"a": Call(kernel, (), {})})
    assert kernel.num_calls == 1


def test_operations_are_timed_in_rounds_of_which_the_median_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a processor that is slow for some rounds is so for all operations."""
    slow, timed = {1: 10.0, 2: 10.0}, []

    def seconds(_: KernelCosts, call: Call) -> float:
        timed.append(call.arguments[0].shape[2])
        return float(call.arguments[0].shape[2]) * slow.get((len(timed) - 1) // 2, 1.0)

    monkeypatch.setattr(KernelCosts, "_seconds", seconds)
    costs = measured(tmp_path, small=convolution(12), large=convolution(24))
    assert sorted(timed[:2]) == [12, 24]
    assert timed == timed[:2] * kernels.MOST_ROUNDS
    assert (costs["small"].seconds, costs["large"].seconds) == (12.0, 24.0)
    monkeypatch.setattr(kernels, "ROUNDS_S", 0.0)
    timed.clear()
    measured(tmp_path / "long", small=convolution(12))
    assert len(timed) == kernels.LEAST_ROUNDS


def test_long_operations_are_timed_once_where_the_time_for_rounds_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round with both takes 2.01 s: the least rounds fit into 7 s and not into 6 s."""
    monkeypatch.setattr(KernelCosts, "_seconds", lambda _, call: call)
    costs = KernelCosts(tmp_path, CPU)
    calls: dict[str, Any] = {"long": 3.0, "short": 4.0}
    first_s = {"long": 2.0, "short": 0.01}
    durations_s = costs._durations(calls, first_s, rounds_s=7.0)
    assert durations_s == {key: [value] * kernels.MOST_ROUNDS for key, value in calls.items()}
    durations_s = costs._durations(calls, first_s, rounds_s=6.0)
    assert durations_s == {"long": [2.0], "short": [4.0] * kernels.MOST_ROUNDS}


def test_a_command_that_is_stopped_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five operations in groups of two, stopped in the last: four of them need no second time."""
    monkeypatch.setattr(kernels, "GROUP_SIZE", 2)
    monkeypatch.setattr(console, "PROGRESS_S", 0.0)
    groups: list[int] = []

    def watched(
        costs: KernelCosts, calls: dict[str, Call], watch: Any = KernelCosts._watched
    ) -> Any:
        groups.append(len(calls))
        if groups == [2, 0] * 2 + [1]:
            raise KeyboardInterrupt
        return watch(costs, calls)

    monkeypatch.setattr(KernelCosts, "_watched", watched)
    calls = {f"{size}": convolution(size) for size in (6, 7, 8, 9, 10)}
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, **calls)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" done, about ")[0] for line in lines] == [
        "medseg: plan: measuring 5 operations on this machine; kept for later plans",
        "medseg: plan: 2 of 5 operations",
        "medseg: plan: 4 of 5 operations",
    ]
    groups.clear()
    assert set(measured(tmp_path, **calls).costs) == set(calls)
    assert groups == [1, 0]


def test_what_a_library_keeps_after_the_first_run_of_an_operation_is_its_own(
    tmp_path: Path,
) -> None:
    """The kernel keeps 5 MiB for each new size, as oneDNN keeps the code that it makes."""
    kept: dict[int, torch.Tensor] = {}

    class Kernel:
        _schema = SimpleNamespace(is_mutable=False)

        def __call__(self, image: torch.Tensor) -> torch.Tensor:
            kept.setdefault(image.numel(), torch.ones(5 * 2**20, dtype=torch.uint8))
            return torch.ones(2**20)

    calls = {f"{size}": Call(Kernel(), (operand(size),), {}) for size in (8, 16)}
    costs = measured(tmp_path, **calls)
    if not kernels.heap_used_bytes():
        pytest.skip("the C library does not tell")
    assert [costs[key].lasting for key in calls] == pytest.approx([5 * 2**20] * 2, rel=0.02)


def test_each_operation_runs_once_a_round_so_that_others_lie_between(tmp_path: Path) -> None:
    order: list[str] = []

    class Kernel:
        _schema = SimpleNamespace(is_mutable=False)

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self) -> torch.Tensor:
            order.append(self.name)
            return torch.zeros(1)

    costs = KernelCosts(tmp_path, CPU)
    calls = {name: Call(Kernel(name), (), {}) for name in "abc"}
    costs._durations(calls, dict.fromkeys(calls, 0.0), kernels.ROUNDS_S)
    assert order == list("abc") * kernels.MOST_ROUNDS


def test_measured_costs_expire_and_those_of_a_loaded_machine_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "present_load", lambda: 0.0)
    monkeypatch.setattr(
        kernels.LoadMeter, "__exit__", lambda meter, *_: setattr(meter, "load", load)
    )
    load = 0.0
    first = measured(tmp_path, small=convolution(12))
    assert KernelCosts(tmp_path, CPU).costs == first.costs
    load = 0.9
    measured(tmp_path, loaded=convolution(8))
    assert set(KernelCosts(tmp_path, CPU).costs) == {"small"}
    monkeypatch.setattr(kernels, "present_load", lambda: 0.9)
    assert set(KernelCosts(tmp_path, CPU).costs) == {"small", "loaded"}, (
        "no better one can be made now"
    )
    now_s = time.time()
    monkeypatch.setattr(calibration.time, "time", lambda: now_s + calibration.MAX_AGE_S + 1)
    assert not KernelCosts(tmp_path, CPU).costs


def test_the_calling_thread_works_on_an_operation_as_long_as_any_other() -> None:
    """So its processor time is that of the operation, also with several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    image, weight = torch.ones(1, 16, 40, 40, 40), torch.ones(16, 16, 3, 3, 3)
    try:
        torch.conv3d(image, weight)
        shares = []
        for _ in range(5):
            own_s, all_s = time.thread_time(), time.process_time()
            torch.conv3d(image, weight)
            own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
            shares.append(own_s / all_s)
    finally:
        torch.set_num_threads(num_threads)
    assert max(shares) > 0.45
    assert min(shares) < 0.9, "the other thread works as well"


def test_what_is_measured_on_a_part_is_continued_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds in proportion to the larger part, bytes along the line of both."""
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    small: Any = "small"
    large: Any = "large"
    divided = [kernels.Part(0.25, small), kernels.Part(0.5, large)]
    monkeypatch.setattr(kernels, "parts_of", lambda *_: divided)
    timed: list[Any] = []

    def durations(calls: dict[str, Any], first_s: dict[str, float], _: float) -> Any:
        timed.append((calls, first_s))
        return {"key": [3.0, 1.0, 2.0]}

    runs: dict[str, Run] = {"small": Run(300, 1.0, 6.0), "large": Run(500, 0.5, 7.0)}
    monkeypatch.setattr(costs, "_lasting", lambda _: {"key": 11})
    monkeypatch.setattr(costs, "_watched", lambda calls: {"key": runs[calls["key"]]})
    monkeypatch.setattr(costs, "_durations", durations)
    call: Any = SimpleNamespace(operation="convolution")
    assert costs._measure({"key": call}, 15.0) == {"key": Cost(900, 450, 11, 4.0)}
    assert timed == [({"key": "large"}, {"key": 7.0})]
