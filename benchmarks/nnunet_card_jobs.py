"""Jobs of `nnunet_card.py`: models by nnU-Net's tools, and one prediction by either program.

    python -m benchmarks.nnunet_card_jobs make <folder> card|rehearsal
    python -m benchmarks.nnunet_card_jobs predict <job.json>

Only a prediction by medseg imports medseg, everything else imports nnU-Net: the two may be in
different environments.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.nnunet_reference import (
    FOLDERS,
    described_network,
    labels_of,
    make_model,
    toy,
)

Job = dict[str, Any]
NNUNET = "nnunetv2.inference.predict_from_raw_data"
# Usual features of nnU-Net's six resolution stages, the finest first.
FEATURES = [32, 64, 128, 256, 320, 320]
# Usual convolutions of each stage of a plain encoder, and blocks of each stage of a residual one.
PLAIN, RESIDUAL = [2] * 6, [1, 3, 4, 6, 6, 6]


def deep_network(
    strides: list[list[int]], kernels: list[list[int]], *, residual: bool
) -> dict[str, Any]:
    """Plan of nnU-Net's usual network of six stages.

    Args:
        strides: Stride of each stage, (z, y, x); the first one is 1.
        kernels: Size of the kernels of each stage, (z, y, x).
        residual: Whether the encoder has residual blocks.

    Returns:
        The entry `architecture` of a configuration in nnU-Net's plans.
    """
    network = described_network(FEATURES[0], residual=residual)
    blocks = "n_blocks_per_stage" if residual else "n_conv_per_stage"
    network["arch_kwargs"] |= {
        "n_stages": len(FEATURES),
        "features_per_stage": FEATURES,
        "strides": strides,
        "kernel_sizes": kernels,
        blocks: RESIDUAL if residual else PLAIN,
        "n_conv_per_stage_decoder": [1] * 5 if residual else [2] * 5,
    }
    return network


def models_of(kind: str) -> dict[str, dict[str, Any]]:
    """Describe the models by their names.

    Args:
        kind: `card`: networks of 31 and 102 million weights; `rehearsal`: small ones of the same
            two families.

    Returns:
        Name of each model to its description by `nnunet_reference.toy`.
    """
    if kind == "rehearsal":
        plain = described_network(4)
        residual = described_network(4, residual=True)
        return {
            "plain": toy(labels_of(5), [6.0, 5.0, 5.0], [16, 32, 32], network=plain),
            "residual": toy(labels_of(3), [8.0, 5.0, 5.0], [8, 32, 32], network=residual),
        }
    whole = [1, 1, 1]
    halved = [2, 2, 2]
    halved_in_plane = [1, 2, 2]
    strides = [whole, halved, halved, halved, halved, halved]
    plain = deep_network(strides, [[3, 3, 3]] * 6, residual=False)
    # Planes that are far apart: the first stage convolves within planes, and two of the five
    # strides keep the number of planes (40 planes become 5).
    strides = [whole, halved_in_plane, halved, halved, halved, halved_in_plane]
    residual = deep_network(strides, [[1, 3, 3], *[[3, 3, 3]] * 5], residual=True)
    return {
        "plain": toy(labels_of(25), [1.5, 1.5, 1.5], [128, 128, 128], network=plain),
        "residual": toy(labels_of(5), [3.0, 0.9, 0.9], [40, 192, 192], network=residual),
    }


def make(output: Path, kind: str) -> None:
    """Write all models; the same weights on every machine with the same torch."""
    for seed, (name, description) in enumerate(models_of(kind).items()):
        torch.manual_seed(seed)
        make_model(output / name, description)


def predict(job: Job) -> dict[str, Any]:
    """Predict a scan by one program; its seconds do not include the imports.

    Args:
        job: `program` (nnunet or medseg), `model`, `scan`, `labels` (the file to write), `device`
            (cuda or cpu), `precision` (fp16: as the program chooses; fp32), `max_ram_gib`.

    Returns:
        `s`; `computed`, the type of the network's output; `card_gb`, the peak of torch's
        allocations on the card; and of medseg's forecast `expected_gb`, the peak, and `loaded_gb`,
        the bytes before the scan.
    """
    is_medseg = job["program"] == "medseg"
    run = predict_by_medseg if is_medseg else predict_by_nnunet
    # Imported before the seconds are counted, and before `torch.autocast` is replaced: modules that
    # are imported later would bind the replacement.
    import_module("medseg.prediction.predict" if is_medseg else NNUNET)
    precision = nullcontext() if is_medseg else nnunet_precision(job["precision"])
    with precision:
        measured = run(job)
    card_bytes = torch.cuda.max_memory_allocated() if job["device"] == "cuda" else 0
    return {**measured, "card_gb": card_bytes / 1e9}


@contextmanager
def nnunet_precision(precision: str) -> Iterator[None]:
    """Leave nnU-Net its half precision on a card (`fp16`), or let it compute in fp32 (`fp32`).

    nnU-Net has no option for fp32: it always enters `torch.autocast`, which is replaced here.
    """
    if precision == "fp16":
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    with mock.patch.object(torch, "autocast", return_value=nullcontext()):
        yield


def predict_by_nnunet(job: Job) -> dict[str, Any]:
    """Predict by nnU-Net's own predictor with its defaults; see `predict`."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    start = time.perf_counter()
    types: list[str] = []  # of the network's output, in each pass
    reader = PlansManager(str(Path(job["model"], "plans.json"))).image_reader_writer_class()
    image, properties = reader.read_images([job["scan"]])
    predictor = nnUNetPredictor(device=torch.device(job["device"]), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(job["model"], None)

    def note_type(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        types.append(str(logits.dtype))

    predictor.network.register_forward_hook(note_type)
    labels = predictor.predict_single_npy_array(image, properties)
    reader.write_seg(labels, job["labels"], properties)
    return {"s": time.perf_counter() - start, "computed": types[-1]}


def predict_by_medseg(job: Job) -> dict[str, Any]:
    """Predict as the command does; see `predict`."""
    import medseg.nnunet.model
    import medseg.prediction.batch
    from medseg.inference.options import InferenceOptions
    from medseg.memory.options import Accelerator, Precision
    from medseg.prediction.options import PredictConfig
    from medseg.prediction.predict import predict_scans

    start = time.perf_counter()
    types: list[str] = []  # of the network's output, in each pass
    expected: list[tuple[int, int]] = []  # peak bytes, and bytes before the scan, of each forecast
    network_module: Any = medseg.nnunet.model
    batch_module: Any = medseg.prediction.batch
    call_network, forecast = network_module.call_network, batch_module.forecast

    def call_and_note(*arguments: Any) -> Any:
        logits = call_network(*arguments)
        types.append(str(logits.dtype))
        return logits

    def forecast_and_note(model: Any, grid: Any, loaded_bytes: int, *arguments: Any) -> Any:
        result = forecast(model, grid, loaded_bytes, *arguments)
        expected.append((result.peak_bytes, loaded_bytes))
        return result

    config = PredictConfig(
        input=job["scan"],
        output=job["labels"],
        weights=job["model"],
        accelerator=Accelerator.gpu if job["device"] == "cuda" else Accelerator.cpu,
        precision=Precision.fp32 if job["precision"] == "fp32" else None,
        inference=InferenceOptions(max_ram_gib=job["max_ram_gib"]),
        overwrite=True,
    )
    with (
        mock.patch.object(network_module, "call_network", call_and_note),
        mock.patch.object(batch_module, "forecast", forecast_and_note),
    ):
        (case,) = predict_scans(config)
    if case.exit_code:
        sys.exit(f"{job['labels']}: {case.messages}")
    # The run announces the first forecast; the last one goes into its report.
    expected_bytes, loaded_bytes = expected[0]
    return {
        "s": time.perf_counter() - start,
        "computed": types[-1],
        "expected_gb": expected_bytes / 1e9,
        "loaded_gb": loaded_bytes / 1e9,
    }


def main() -> None:
    """Run a command."""
    # nnU-Net asks for these when it is imported, and uses them in training alone.
    for variable in FOLDERS:
        os.environ.setdefault(variable, "/nonexistent")
    command, path, *more = sys.argv[1:]
    if command == "make":
        make(Path(path), *more)
        return
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    measured = predict(job)
    Path(job["measured"]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
