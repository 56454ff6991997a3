"""Models of nnU-Net on a GPU, in medseg and in nnU-Net's own predictor on the same card.

    python -m benchmarks.nnunet_card output=<folder> scan=<ct> [models=plain,residual]
                                     [nnunet=<python>]

Makes two models with nnU-Net's tools and random weights: the usual plain network with 25 classes,
and an anisotropic residual one. The predictions of each model, each in a process of its own, are:

* both programs with their default on a card, half precision by torch's autocast;
* both programs in fp32, without autocast and TF32;
* nnU-Net a second time, which shows how far its choice of kernels changes labels;
* medseg under `inference.max_ram_gib`: what its libraries and weights take, and half of what its
  default prediction adds to them.

Writes `nnunet_card.md` after each prediction. Without a card it rehearses on the CPU with small
networks. `nnunet` is another Python that has nnU-Net, if this Python lacks it.
"""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.instruments import ROOT, given_arguments, print_values
from benchmarks.nnunet_table import least_dice
from medseg.io.atomic import replace_text
from medseg.io.read import read_image
from medseg.io.tables import markdown_table
from medseg.memory.kernels import processor_name
from medseg.prediction.memory_limit import LEAST_BYTES, OVERHEAD_BYTES

JOBS = "benchmarks.nnunet_card_jobs"
LAUNCHER = ROOT / "benchmarks" / "launch.py"
Row = dict[str, Any]


class Run(NamedTuple):
    """A prediction of the plan.

    Attributes:
        name: Name in the tables.
        program: nnunet or medseg.
        precision: fp16 or fp32, see `nnunet_card_jobs.predict`.
        against: Names of the runs whose labels are compared with its own.
        is_bounded: Whether it gets `inference.max_ram_gib`.
    """

    name: str
    program: str
    precision: str
    against: tuple[str, ...] = ()
    is_bounded: bool = False


# Each run comes after those that it is compared with, and the bounded run after the one from which
# its limit is computed.
RUNS = (
    Run("nnU-Net", "nnunet", "fp16"),
    Run("medseg", "medseg", "fp16", ("nnU-Net",)),
    Run("medseg bounded", "medseg", "fp16", ("medseg",), is_bounded=True),
    Run("nnU-Net again", "nnunet", "fp16", ("nnU-Net",)),
    Run("nnU-Net fp32", "nnunet", "fp32", ("nnU-Net",)),
    Run("medseg fp32", "medseg", "fp32", ("nnU-Net fp32", "medseg")),
)


def main() -> None:
    """Run all predictions of all models and write the page."""
    output, arguments = given_arguments(["models", "nnunet"], required=["scan"])
    has_card = torch.cuda.is_available()
    pythons = {"nnunet": arguments.get("nnunet", sys.executable), "medseg": sys.executable}
    models = output / "models"
    kind = "card" if has_card else "rehearsal"
    if not models.is_dir():
        start(pythons["nnunet"], "make", str(models), kind)
    costs: list[Row] = []
    labels: list[Row] = []
    for name in arguments.get("models", "plain,residual").split(","):
        (folder,) = (models / name).iterdir()  # nnU-Net's own folder, the only one
        measured: dict[str, Row] = {}  # by the name of the run
        for run in RUNS:
            job: Row = {
                "program": run.program,
                "precision": run.precision,
                "device": "cuda" if has_card else "cpu",
                "model": str(folder),
                "scan": str(Path(arguments["scan"]).absolute()),
                "labels": str(label_file(output, name, run.name)),
                "max_ram_gib": None,
            }
            if run.is_bounded:
                job["max_ram_gib"] = limit_gib(measured["medseg"])
            cost = measured_job(pythons[run.program], job, output)
            measured[run.name] = cost
            costs.append(cost_row(name, run, job, cost))
            print_values(costs[-1], 4)
            for other in run.against:
                labels.append(label_row(output, name, other, run.name))
                print_values(labels[-1], 6)
            replace_text(output / "nnunet_card.md", page(has_card, costs, labels))
    print(output / "nnunet_card.md")


def start(python: str, *arguments: str) -> Row:
    """Run a command of the jobs in a process of its own, and return its cost.

    Args:
        python: Python that runs it.
        arguments: The command, a path, and further arguments.

    Returns:
        The report of `launch.py`.

    Raises:
        RuntimeError: If the command fails, with the end of its output.
    """
    # The file lies beside the path that the command gets.
    cost_file = Path(arguments[1]).with_suffix(".cost.json")
    command = [sys.executable, str(LAUNCHER), str(cost_file), python, "-m", JOBS, *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, encoding="utf-8", check=False
    )
    cost: Row = json.loads(cost_file.read_text(encoding="utf-8"))
    cost_file.unlink()
    if cost["exit_code"]:
        raise RuntimeError((result.stdout + result.stderr)[-3000:])
    return cost


def measured_job(python: str, job: Row, output: Path) -> Row:
    """Predict; return the measurements of the job, and its peak of resident memory as `peak_gb`."""
    job_file = output / "job.json"
    measured_file = output / "measured.json"
    job_file.write_text(json.dumps({**job, "measured": str(measured_file)}), encoding="utf-8")
    cost = start(python, "predict", str(job_file))
    measured: Row = json.loads(measured_file.read_text(encoding="utf-8"))
    return {**measured, "peak_gb": cost["peak_bytes"] / 1e9}


def limit_gib(cost: Row) -> float:
    """Choose `inference.max_ram_gib`: libraries and weights, and half of a run's other memory.

    Args:
        cost: Cost of the run without a limit.
    """
    # GB of the cost are 10⁹ bytes, GiB of the key 2³⁰.
    added_bytes = (cost["expected_gb"] - cost["loaded_gb"]) * 1e9
    # medseg refuses to run if less than `LEAST_BYTES` is left; twice as much is safe.
    least_bytes = OVERHEAD_BYTES + 2 * LEAST_BYTES
    limit_bytes = cost["loaded_gb"] * 1e9 + max(added_bytes / 2, least_bytes)
    # Rounded up to a hundredth.
    return math.ceil(limit_bytes / 2**30 * 100) / 100


def label_file(output: Path, model: str, run: str) -> Path:
    """Label map of a run."""
    return output / f"{model}_{run.replace(' ', '_')}.nii.gz"


def cost_row(model: str, run: Run, job: Row, cost: Row) -> Row:
    """Row of the table of runs."""
    max_ram_gib = job["max_ram_gib"]
    return {
        "model": model,
        "run": run.name,
        "network's output": cost["computed"].removeprefix("torch."),
        "s": cost["s"],
        "host GB": cost["peak_gb"],
        "expected GB": cost.get("expected_gb"),
        "with weights GB": cost.get("loaded_gb"),
        "limit GB": None if max_ram_gib is None else max_ram_gib * 2**30 / 1e9,
        "card GB": cost["card_gb"],
    }


def label_row(output: Path, model: str, first: str, second: str) -> Row:
    """Compare the label maps of two runs: a row of the second table."""
    first_labels = read_image(label_file(output, model, first)).array
    second_labels = read_image(label_file(output, model, second)).array
    return {
        "model": model,
        "labels of": first,
        "and of": second,
        "labels": len(set(first_labels.ravel().tolist())),  # values, with the background
        "voxels": first_labels.size,
        "voxels that differ": int((first_labels != second_labels).sum()),
        "least Dice": least_dice(first_labels, second_labels),
    }


def page(has_card: bool, costs: list[Row], labels: list[Row]) -> str:
    """Format the page: a title with the machine, the costs of the runs, their labels compared."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    title = f"REHEARSAL on a CPU ({processor_name()}), small networks, {versions}"
    if has_card:
        cudnn = torch.backends.cudnn.version()
        card = torch.cuda.get_device_name()
        title = f"{card}, CUDA {torch.version.cuda}, cuDNN {cudnn}, {versions}"
    formats = {"s": ".1f", "least Dice": ".6f"}
    for name in costs[0]:
        if name.endswith("GB"):
            formats[name] = ".2f"
    sections = [f"# {title}\n", markdown_table(costs, formats=formats)]
    if labels:
        sections.append(markdown_table(labels, formats=formats))
    return "\n".join(sections)


if __name__ == "__main__":
    main()
