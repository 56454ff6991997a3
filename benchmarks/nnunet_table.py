"""Models of nnU-Net in medseg and in nnU-Net's own predictor: labels, CPU seconds, memory.

    python -m benchmarks.nnunet_table output=<folder> nnunet=<python> scans=<ct>[,<ct>]
                                      [models=<model>,<folder>,<model>+<model>,…]
                                      [precision=fp32|bf16|fp16]

`nnunet` is the Python of an environment that has nnU-Net and not medseg. Makes the models of
`nnunet_reference.py`, segments each scan and a phantom with both programs, one after the other on
one thread, and writes `nnunet.csv` with a row for each model and scan.

`models` has names of these models, or folders that hold a model folder of nnU-Net (or the two of a
cascade); `a+b` is an ensemble. The second channel of a model is the scan with its sign inverted.
`precision` is that of medseg alone; without this argument medseg chooses. Each prediction has a
process of its own, whose seconds and memory are counted after the imports.

The forecast of memory is that of `predict`. The forecast of seconds is computed from the first scan
of the model, as in `predict`, but in CPU seconds, because other programs may share the machine.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import medseg.nnunet.model
import medseg.prediction.batch
from benchmarks.instruments import ROOT, given_arguments, print_values
from benchmarks.nnunet_reference import FOLDERS, PassClock, measured_apart
from medseg.geometry.grid import VoxelBox
from medseg.io.inputs import case_name
from medseg.io.lean_nibabel import import_nibabel
from medseg.io.read import read_image
from medseg.io.tables import write_csv
from medseg.io.write import write_image
from medseg.memory.heap import map_large_blocks
from medseg.memory.options import Accelerator, Precision
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import draw_spec
from medseg.prediction.forecast import Forecast, rate_of
from medseg.prediction.options import PredictConfig
from medseg.prediction.predict import predict_scans

REFERENCE = ROOT / "benchmarks" / "nnunet_reference.py"
# Plain and residual encoders, 2 to 61 classes, regions of two channels, three folds, planes apart,
# transposed axes, plans without `architecture`, 2D and a cascade.
MODELS = (
    "plain2",
    "plain5",
    "plain25",
    "plain61",
    "residual5",
    "regions",
    "anisotropic",
    "transposed",
    "torch",
    "2d",
    "cascade",
)
# Part of a phantom in voxels (z, y, x): 4 × 6 × 13 cm with both lungs.
PHANTOM_BOX = VoxelBox((28, 54, 42), (36, 74, 86))
# Builds nnU-Net's networks. nnU-Net's predictor imports it before its seconds are counted, so it is
# imported before those of medseg too.
NETWORKS = "dynamic_network_architectures.architectures.unet"
Row = dict[str, Any]


def main() -> None:
    """Measure all models and scans and write the table."""
    output, arguments = given_arguments(["models", "precision"], required=["nnunet", "scans"])
    names = arguments.get("models", ",".join(MODELS)).split(",")
    scans = [Path(scan).absolute() for scan in arguments["scans"].split(",")]
    precision = arguments.get("precision")
    models = output / "models"
    if not models.is_dir():
        start_reference(arguments["nnunet"], "make", models).wait()
    # In a process of its own: the measured ones are forks of this one, and would begin with the
    # memory that a phantom has left here.
    scans.append(Path(measured_apart(write_phantom, output)["path"]))
    torch.set_num_threads(1)
    # Imports that the measured processes inherit; `predict` too imports nibabel without pydicom.
    import_nibabel()
    import_module(NETWORKS)
    rows: list[Row] = []
    with start_reference(arguments["nnunet"], "measure") as nnunet:
        assert nnunet.stdin is not None
        assert nnunet.stdout is not None
        for job in list_jobs(names, scans, output, precision):
            # One line asks for a prediction, and one line answers once it has ended.
            nnunet.stdin.write(json.dumps(job) + "\n")
            nnunet.stdin.flush()
            of_nnunet = json.loads(nnunet.stdout.readline())
            own = measured_apart(predict_job, job)
            # The rate of the first scan of a model predicts the seconds of the others.
            first = next((row for row in rows if row["model"] == job["name"]), None)
            rows.append(row_of(job, of_nnunet, own, first))
            print_values(rows[-1], 3)
            write_csv(output / "nnunet.csv", rows)


def start_reference(python: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    """Start a command of `nnunet_reference.py` in the other environment."""
    # Without PYTHONPATH the script finds its own folder alone, and no module of medseg.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for variable in FOLDERS:
        environment.setdefault(variable, "/nonexistent")
    command = [python, str(REFERENCE), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


def list_jobs(
    names: Sequence[str], scans: Sequence[Path], output: Path, precision: str | None
) -> list[Row]:
    """List the predictions, as `nnunet_reference.py measure` takes them."""
    jobs = []
    for name in names:
        folders = [model_folder(member, output) for member in name.split("+")]
        # Without the path, where the user named a folder.
        short_name = "+".join(folder.parent.name for folder in folders)
        # The members of an ensemble have the same channels and labels.
        dataset = json.loads((folders[0] / "dataset.json").read_text(encoding="utf-8"))
        for number, scan in enumerate(scans):
            stem = f"{short_name}_{number}"
            channels = [scan]
            if len(dataset["channel_names"]) == 2:
                channels.append(write_second_channel(scan, output))
            jobs.append(
                {
                    "name": short_name,
                    "models": list(map(str, folders)),
                    "scans": list(map(str, channels)),
                    "labels": str(output / f"{stem}_nnunet.nii.gz"),
                    "own_labels": str(output / f"{stem}.nii.gz"),
                    "classes": len(dataset["labels"]),
                    "precision": precision,
                }
            )
    return jobs


def model_folder(name: str, output: Path) -> Path:
    """Find the model folder of one of `MODELS`, or the one in a folder of the user."""
    parent = output / "models" / name
    if not parent.is_dir():
        parent = Path(name).absolute()
    # For a cascade this is the second stage: 3d_cascade_fullres sorts before 3d_lowres.
    return min(parent.glob("*__*__*"))


def write_phantom(output: Path) -> Row:
    """Write a part of a phantom; returns its path."""
    phantom = make_phantom(draw_spec(0, 0))
    path = output / "phantom.nii.gz"
    write_image(path, phantom.image_hu[PHANTOM_BOX.slices()], phantom.grid.crop(PHANTOM_BOX))
    return {"path": str(path)}


def write_second_channel(scan: Path, output: Path) -> Path:
    """Write a scan with its sign inverted, as the second channel of a model."""
    volume = read_image(scan)
    path = output / f"{case_name(scan)}_second.nii.gz"
    write_image(path, -volume.array, volume.grid)
    return path


def predict_job(job: Row) -> Row:
    """Predict a scan as the command does; returns its CPU seconds and the forecast.

    Runs in a process of its own, see `measured_apart`, so the functions that it replaces in modules
    stay replaced.
    """
    map_large_blocks()
    clock = PassClock()
    watch_passes(clock)
    forecasts = []
    # CPU seconds of the process and inside passes, at the time of each forecast.
    times_s = []
    module: Any = medseg.prediction.batch
    forecast = module.forecast

    def forecast_and_note(*arguments: Any) -> Any:
        forecasts.append(forecast(*arguments))
        times_s.append((time.process_time(), clock.seconds))
        return forecasts[-1]

    module.forecast = forecast_and_note
    channels: Any = job["scans"][0] if len(job["scans"]) == 1 else job["scans"]
    config = PredictConfig(
        input=channels,
        output=job["own_labels"],
        weights=job["models"],
        ensemble=len(job["models"]) > 1,
        threads=1,
        accelerator=Accelerator.cpu,
        precision=Precision(job["precision"]) if job["precision"] else None,
        overwrite=True,
    )
    (case,) = predict_scans(config)
    if case.exit_code:
        sys.exit(f"{job['own_labels']}: {case.messages}")
    # The case lasts from the first forecast, before the scan is read, to the one in the report. A
    # pass while the model is loaded is no part of it.
    start, passes_start_s = times_s[0]
    end, passes_end_s = times_s[-1]
    return {
        "network_cpu_s": clock.seconds,
        "case_cpu_s": end - start,
        "case_network_cpu_s": passes_end_s - passes_start_s,
        "expected_gb": forecasts[0].peak_bytes / 1e9,
        "expected_voxels": forecasts[0].time_units,
        "expected_operations": forecasts[0].operations,
    }


def watch_passes(clock: PassClock) -> None:
    """Count the CPU seconds of all passes of nnU-Net's networks, whole or in slabs."""
    module: Any = medseg.nnunet.model
    call_network, logits_in_slabs = module.call_network, module.logits_in_slabs

    def timed_call(*arguments: Any) -> Any:
        clock.start()
        logits = call_network(*arguments)
        clock.stop()
        return logits

    def timed_slabs(network: Any, image: Any, budget_bytes: float, take: Any) -> None:
        def untimed_take(planes: Any) -> None:
            # The caller adds up the logits in `take`, which is no part of the pass.
            clock.stop()
            take(planes)
            clock.start()

        clock.start()
        logits_in_slabs(network, image, budget_bytes, untimed_take)
        clock.stop()

    module.call_network, module.logits_in_slabs = timed_call, timed_slabs


def row_of(job: Row, of_nnunet: Row, own: Row, first: Row | None) -> Row:
    """Compare the two predictions of a scan.

    Args:
        job: The scan and its model.
        of_nnunet: Costs of nnU-Net; `error` if it did not finish.
        own: Costs of medseg.
        first: Row of the first scan of the model, if this is another one.
    """
    labels = read_image(Path(job["own_labels"])).array
    row = {
        "model": job["name"],
        "classes": job["classes"],
        "scan": Path(job["scans"][0]).name.partition(".")[0],
        "shape": "x".join(map(str, labels.shape)),
        "cpu_s": own["cpu_s"],
        "network_cpu_s": own["network_cpu_s"],
        "case_cpu_s": own["case_cpu_s"],
        "case_network_cpu_s": own["case_network_cpu_s"],
        "peak_gb": own["peak_gb"],
        "expected_gb": own["expected_gb"],
        "expected_voxels": own["expected_voxels"],
        "expected_operations": own["expected_operations"],
        "expected_case_cpu_s": None,
    }
    if first is not None:
        rate = rate_of(forecast_in(first), first["case_cpu_s"], first["case_network_cpu_s"])
        row["expected_case_cpu_s"] = rate.seconds(forecast_in(own))
    if "error" in of_nnunet:
        return {**row, "nnunet_error": of_nnunet["error"]}
    expected = read_image(Path(job["labels"])).array
    # CPU seconds outside the passes: reading, resampling, adding up, writing.
    outside_s = own["cpu_s"] - own["network_cpu_s"]
    nnunet_outside_s = of_nnunet["cpu_s"] - of_nnunet["network_cpu_s"]
    return {
        **row,
        "nnunet_error": None,
        "voxels": labels.size,
        "voxels_that_differ": int(np.count_nonzero(labels != expected)),
        "least_dice": least_dice(labels, expected),
        "nnunet_cpu_s": of_nnunet["cpu_s"],
        "nnunet_network_cpu_s": of_nnunet["network_cpu_s"],
        "nnunet_peak_gb": of_nnunet["peak_gb"],
        "ratio_outside": outside_s / nnunet_outside_s,
        "ratio": own["cpu_s"] / of_nnunet["cpu_s"],
    }


def forecast_in(row: Row) -> Forecast:
    """Rebuild the forecast of a row, without its bytes, which do not affect the seconds."""
    return Forecast({}, row["expected_voxels"], row["expected_operations"])


def least_dice(labels: np.ndarray, expected: np.ndarray) -> float:
    """Smallest Dice of the labels that are in either map; 1 where there are none."""
    # `unique` first: `union1d` of the maps themselves would concatenate both.
    values = np.union1d(np.unique(labels), np.unique(expected))
    scores = [1.0]
    for value in values[values > 0]:
        mask = labels == value
        expected_mask = expected == value
        overlap = np.count_nonzero(mask & expected_mask)
        total = np.count_nonzero(mask) + np.count_nonzero(expected_mask)
        scores.append(2 * overlap / total)
    return min(scores)


if __name__ == "__main__":
    main()
