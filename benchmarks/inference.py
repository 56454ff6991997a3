"""Inference benchmark: medseg and three baselines on one CT, with the same number of threads.

    python benchmarks/inference.py output=bench             # the keys are the fields of `Options`

Writes `bench.csv` and `bench.md`; ratios refer to the first row, medseg from file to file. Each
baseline is measured in a process of its own, `python benchmarks/inference.py measure <name> <scan>
<threads>`. A baseline that would take hours runs a part of its work; its row says which part, and
how much the passes of this part differ.
"""

import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from medseg.cascade.load import load_stage
from medseg.console import say
from medseg.errors import EXIT_USER_ERROR, UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_text
from medseg.io.read import read_image
from medseg.io.tables import markdown_table, write_csv
from medseg.io.write import write_image
from medseg.memory.options import Precision
from medseg.memory.precision import autocast, inference_precision
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec
from medseg.preprocess.intensity import HU_LIMITS, normalise_hu
from medseg.preprocess.orient import orient
from medseg.preprocess.resample import resample_image
from medseg.studies.baselines import install_baselines, make_baseline
from medseg.weights.files import read_weights, shipped_weights

Row = dict[str, Any]
Shape = tuple[int, int, int]


class Way(NamedTuple):
    """A setting of a baseline that decides the amount of work, such as nnU-Net without mirroring.

    Attributes:
        num_passes: Passes through the network that the whole scan takes.
        passes: Plural noun for the passes, as in "3 of 60 slices".
        title: How the way differs from the others of the baseline; empty where there is one way.
    """

    num_passes: int
    passes: str
    title: str = ""


class Part(NamedTuple):
    """Part of the work of a baseline that is run and timed; the rest is scaled from it.

    Attributes:
        runs: Functions to time one by one.
        ways: Settings of the baseline, each of which gets a row from these times.
        passes_a_run: Passes that each function makes, in the unit of `Way.num_passes`.
        run_name: Work of one function, in words that follow its seconds.
        precision: Number format of the passes.
    """

    runs: Sequence[Callable[[], Any]]
    ways: Sequence[Way]
    passes_a_run: int = 1
    run_name: str = "each"
    precision: str = "fp32"


# Title of each baseline in the table.
BASELINES = {
    "lungmask": "lungmask, network of R231",
    "nnunet": "nnU-Net, default network at 1 mm",
    "monai": "MONAI, sliding window with our fine network at 1 mm",
}
# Heading in bench.md of each key of a row.
HEADINGS = {
    "contender": "",
    "precision": "precision",
    "wall_s": "wall s",
    "cpu_s": "CPU s",
    "peak_gb": "peak GB",
    "wall_ratio": "wall ratio",
    "cpu_ratio": "CPU ratio",
    "measured": "measured, rest scaled",
}
# Columns of bench.csv, which programs outside read.
COLUMNS = [key for key in HEADINGS if key != "precision"]
LUNGMASK_SLICES = 20  # lungmask's own batch size
LUNGMASK_BATCHES = 3  # batches that are timed
LUNGMASK_SIZE = 256  # pixels per side to which lungmask resizes the body in each slice
NNUNET_PATCH: Shape = (128, 128, 128)
# Axes of (N, C, D, H, W) that are flipped in each pass of a tile: all subsets of the three.
NNUNET_MIRRORS = ((), (2,), (3,), (4,), (2, 3), (2, 4), (3, 4), (2, 3, 4))
# A program that starts the measured process. Linux keeps the peak of resident memory over `exec`:
# started from here, that process would begin with the peak of this one, over 1 GB with a phantom.
LAUNCHER = Path(__file__).with_name("launch.py")
ONE_MM = (1.0, 1.0, 1.0)
FORMATS = {
    "wall_s": ".1f",
    "cpu_s": ".1f",
    "peak_gb": ".2f",
    "wall_ratio": ".1f",
    "cpu_ratio": ".1f",
}


@dataclass
class Options:
    """Keys of the command line.

    Attributes:
        output: Folder of `bench.csv` and `bench.md`.
        input: CT; null = a phantom of 512×512×300 voxels of 0.75×0.75×1 mm, made once in `output`.
        threads: CPU threads of every process.
        peers: Also measure lungmask, nnU-Net and MONAI.
        peers_env: Folder of their packages, made by pip on first use.
    """

    output: str = "bench_inference"
    input: str | None = None
    threads: int = 2
    peers: bool = True
    peers_env: str = ".venv-bench"


def main() -> None:
    """Read the command line and run the benchmark, or measure the baseline that it names."""
    # The process of a baseline, see `run_benchmark`.
    if sys.argv[1:2] == ["measure"]:
        measure_baseline(*sys.argv[2:])
        return
    try:
        arguments = OmegaConf.from_dotlist(sys.argv[1:])
        merged = OmegaConf.merge(OmegaConf.structured(Options), arguments)
        run_benchmark(cast(Options, OmegaConf.to_object(merged)))
    except OmegaConfBaseException as error:
        keys = " ".join(f"{key}={value}" for key, value in vars(Options()).items())
        say(f"{str(error).splitlines()[0]}; the keys and their defaults are {keys}")
        sys.exit(EXIT_USER_ERROR)
    except UserError as error:
        say(str(error))
        sys.exit(EXIT_USER_ERROR)


def run_benchmark(options: Options) -> None:
    """Measure medseg and the baselines one after the other; write and print the table.

    Raises:
        UserError: If the input is missing, the baselines cannot be installed, or a process fails.
    """
    output = Path(options.output).absolute()
    scan = Path(options.input).absolute() if options.input else make_scan(output)
    if not scan.exists():
        raise UserError(
            f"input={options.input}: this file or folder does not exist; check the path"
        )
    # Before any measurement, which a failed installation would waste.
    packages = install_baselines(Path(options.peers_env).absolute()) if options.peers else None
    command = [
        "-m",
        "medseg.commands.cli",
        "predict",
        f"input={scan}",
        f"output={output / 'lungs.nii.gz'}",
        "accelerator=cpu",
        f"threads={options.threads}",
        "overwrite=true",
    ]
    ours, _ = measure("medseg, from file to file", command, options.threads)
    # The page shows the number format: medseg may compute in bf16, most baselines in fp32.
    rows = [ours | {"precision": our_precision()}]
    if packages is not None:
        for name, title in BASELINES.items():
            command = [__file__, "measure", name, str(scan), str(options.threads)]
            row, printed = measure(title, command, options.threads, packages)
            # The last line describes each way of the baseline, see `measure_baseline`.
            for arguments in json.loads(printed.splitlines()[-1]):
                rows.append(scaled(row, **arguments))
    for row in rows:
        row["wall_ratio"] = row["wall_s"] / ours["wall_s"]
        row["cpu_ratio"] = row["cpu_s"] / ours["cpu_s"]
    page = markdown_table(rows, HEADINGS, FORMATS)
    table = [{key: row[key] for key in COLUMNS} for row in rows]
    write_csv(output / "bench.csv", table, COLUMNS, FORMATS)
    replace_text(output / "bench.md", page)
    print(page, end="")


def make_scan(folder: Path) -> Path:
    """Make the phantom of the benchmark, 512×512×300 voxels of 0.75×0.75×1 mm, unless it exists."""
    path = folder / "ct.nii.gz"
    if path.is_file():
        return path
    print(f"making {path}", flush=True)
    spec = PhantomSpec(
        seed=7,
        index=0,
        spacing_mm=(1.0, 0.75, 0.75),
        matrix=(512, 512),
        num_slices=300,
        model_spacing_mm=(1.5, 1.5, 1.5),
    )
    phantom = make_phantom(spec)
    write_image(path, phantom.image_hu, phantom.grid)
    return path


def our_precision() -> str:
    """Name the number formats in which the included networks run on this processor by default."""
    formats = []
    for stage in ("coarse", "fine"):
        metadata, _ = read_weights(shipped_weights("lungs", stage), stage, stage)
        formats.append(inference_precision(Precision(metadata["precision"]).value, "cpu"))
    # A format that both stages share is named once.
    return " and ".join(dict.fromkeys(formats))


def measure(
    name: str, arguments: Sequence[str], threads: int, packages: Path | None = None
) -> tuple[Row, str]:
    """Run a Python process to its end and read its costs from the operating system.

    Args:
        name: Name of the row.
        arguments: Arguments of Python.
        threads: OpenMP threads of the process.
        packages: Folder of packages that come before those of this environment; None = no other
            packages.

    Returns:
        The row, with seconds from the start of the process to its end, CPU seconds of all its
        threads, and its largest resident memory in GB; and what the process printed.

    Raises:
        UserError: If the process fails.
    """
    print(f"measuring {name}", flush=True)
    paths = [str(Path(__file__).resolve().parents[1])]
    if packages is not None:
        paths.insert(0, str(packages))
    # An empty entry of PYTHONPATH would be the working folder.
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cost.json"
        # `-I -S`: the launcher needs nothing from the environment, and stays small.
        launch = [sys.executable, "-I", "-S", str(LAUNCHER), str(report)]
        process = subprocess.run(
            [*launch, sys.executable, *arguments],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
            # The launcher itself succeeds; the exit code of the program is in its report.
            check=True,
        )
        cost = json.loads(report.read_text(encoding="utf-8"))
    code = cost["exit_code"]
    if code != 0:
        raise UserError(f"{name} could not be measured (exit code {code}); see the message above")
    row = {
        "contender": name,
        "wall_s": cost["wall_s"],
        "cpu_s": cost["cpu_s"],
        "peak_gb": cost["peak_bytes"] / 1e9,
        "measured": "all",
    }
    return row, process.stdout


def scaled(
    row: Row,
    part_s: float,
    part_cpu_s: float,
    share: float,
    measured: str,
    precision: str,
    title: str = "",
) -> Row:
    """Scale the part of the work that a process did to the whole.

    Start-up and reading are counted once.

    Args:
        row: Cost of the process.
        part_s: Seconds of the part.
        part_cpu_s: CPU seconds of the part.
        share: Passes of the part divided by those of the whole work, above 0; above 1 if more
            passes were timed than the whole work has.
        measured: The part in words, for the row.
        precision: Number format of the part.
        title: What distinguishes the row from others of the same baseline.

    Returns:
        The row with the costs of the whole work. Its memory stays that of the process.
    """
    contender = row["contender"]
    if title:
        contender += f", {title}"
    # Number of further parts of the same size in the whole work; negative if the part is larger.
    remaining_parts = 1 / share - 1
    return row | {
        "contender": contender,
        "wall_s": row["wall_s"] + remaining_parts * part_s,
        "cpu_s": row["cpu_s"] + remaining_parts * part_cpu_s,
        "measured": measured,
        "precision": precision,
    }


def measure_baseline(name: str, scan: str, threads: str) -> None:
    """Run the work of a baseline on a scan.

    The last line that is printed is JSON: for each way of the baseline, the arguments of `scaled`.
    """
    torch.set_num_threads(int(threads))
    volume = read_image(Path(scan))
    image_hu, grid, _ = orient(volume.array, volume.grid)
    make_part = {"lungmask": lungmask, "nnunet": nnunet, "monai": monai}[name]
    part = make_part(image_hu, grid)
    cpu_s = []  # of each function
    part_start = time.perf_counter()
    with torch.inference_mode():
        for run in part.runs:
            start = time.process_time()
            run()
            cpu_s.append(time.process_time() - start)
    part_s = time.perf_counter() - part_start
    print(json.dumps([describe_part(part, way, part_s, cpu_s) for way in part.ways]))


def describe_part(part: Part, way: Way, part_s: float, cpu_s: Sequence[float]) -> dict[str, Any]:
    """Return the arguments of `scaled` for one way to do the whole work.

    Args:
        part: The passes that were timed.
        way: The setting that the row is of.
        part_s: Seconds of all functions of the part.
        cpu_s: CPU seconds of each function; other programs on the machine disturb them less than
            wall seconds.
    """
    num_timed = len(part.runs) * part.passes_a_run
    measured = "all"
    if num_timed < way.num_passes:
        measured = f"{num_timed} of {way.num_passes} {way.passes}"
    if len(cpu_s) > 1:
        measured += f", {min(cpu_s):.1f} to {max(cpu_s):.1f} CPU s {part.run_name}"
    return {
        "part_s": part_s,
        "part_cpu_s": sum(cpu_s),
        "share": num_timed / way.num_passes,
        "measured": measured,
        "precision": part.precision,
        "title": way.title,
    }


def lungmask(_: np.ndarray, grid: VoxelGrid) -> Part:
    """The network of lungmask's R231, with random weights, on some of its batches of slices."""
    # Run as a file: importing the package would import image libraries that the network does not
    # need. `find_spec` of a package finds its folder without importing it.
    (folder,) = find_spec("lungmask").submodule_search_locations  # type: ignore[union-attr, misc]
    unet = runpy.run_path(f"{folder}/resunet.py")["UNet"]
    network = unet(
        n_classes=3, padding=True, depth=5, up_mode="upsample", batch_norm=True, residual=False
    ).eval()
    # A scan of few slices has smaller or fewer batches. Values of voxels do not change the time.
    num_slices = min(LUNGMASK_SLICES, grid.shape[0])
    num_batches = max(1, min(LUNGMASK_BATCHES, grid.shape[0] // num_slices))
    slices = torch.zeros(num_slices, 1, LUNGMASK_SIZE, LUNGMASK_SIZE)
    return Part(
        runs=[lambda: network(slices)] * num_batches,
        ways=[Way(grid.shape[0], "slices")],
        passes_a_run=num_slices,
        run_name=f"a batch of {num_slices}",
    )


def nnunet(_: np.ndarray, grid: VoxelGrid) -> Part:
    """nnU-Net's default network, with random weights, on one tile of its predictor at 1 mm.

    The tile takes eight passes, each with another set of flipped axes. From their times two rows
    are scaled: with mirroring (eight passes a tile), and without (one pass a tile).
    """
    network = make_baseline("nnunet", 3).eval()  # three classes: background and both lungs
    num_all = num_tiles(grid.resampled(ONE_MM).shape, NNUNET_PATCH)
    tile = torch.zeros(1, 1, *NNUNET_PATCH)

    def run(axes: tuple[int, ...]) -> Tensor:
        return torch.flip(network(torch.flip(tile, axes)), axes)

    passes = "passes of 128×128×128"
    num_mirrors = len(NNUNET_MIRRORS)
    mirrored = Way(
        num_all * num_mirrors, f"{passes}, {num_mirrors} a tile", "mirrored as by default"
    )
    plain = Way(num_all, f"{passes}, 1 a tile", "without mirroring")
    return Part([partial(run, axes) for axes in NNUNET_MIRRORS], [mirrored, plain])


def num_tiles(shape: Shape, patch: Shape) -> int:
    """Count the tiles of nnU-Net's predictor, which lie half a tile apart or nearer.

    A volume that is smaller than a tile is padded to one.

    Example:
        >>> num_tiles((300, 384, 128), (128, 128, 128))
        20
    """
    number = 1
    for size, side in zip(shape, patch, strict=True):
        # A first tile, and one more for each half of a tile that remains, or a part of it.
        number *= 1 + math.ceil(max(0, size - side) / (side / 2))
    return number


def monai(image_hu: np.ndarray, grid: VoxelGrid) -> Part:
    """MONAI's sliding window with our fine network and precision, over the whole volume at 1 mm.

    The network also takes the probabilities of a coarse stage as channels. MONAI has no coarse
    stage: the channels are filled with -1, "nowhere", which costs as much time as any other value.
    """
    from monai.inferers import sliding_window_inference

    path = shipped_weights("lungs", "fine")
    stage = load_stage(path, "fine", torch.device("cpu"))
    # The tile of the training, which a stage for prediction does not hold.
    metadata, _ = read_weights(path, "fine", "fine")
    patch = metadata["patch_size"]

    def network(tiles: Tensor) -> Tensor:
        with autocast(stage.precision, "cpu"):
            return cast(Tensor, stage.network(tiles))

    def run() -> None:
        resampled = resample_image(
            image_hu, grid, grid.resampled(ONE_MM), stage.outside[0], limits=HU_LIMITS
        )
        image = normalise_hu(resampled, stage.task.window_hu)
        # (N, C, D, H, W): the image, then the channels of the coarse stage.
        channels = image.new_full((1, stage.num_channels, *image.shape), -1.0)
        channels[0, 0] = image
        sliding_window_inference(channels, patch, 1, network, mode="gaussian")

    return Part([run], [Way(1, "")], precision=stage.precision)


if __name__ == "__main__":
    main()
