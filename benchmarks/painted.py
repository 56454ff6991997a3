"""Painted copies: files of training cases with disease and pleural fluid painted into their lungs.

    python -m benchmarks.painted output=<folder> cases=<table.csv> [fold=0] [num_folds=5]
        [copies=2] [phantoms=0]

Augmentation can paint disease while a stage trains. For a fine stage that takes the coarse
probabilities as input (`stage.coarse_channel`) the disease must be in the files, so that the coarse
stage sees it too.

Writes up to two copies of each training case of a fold, `<case>_ill<n>.nii.gz` with labels, then
`phantoms` whole chests with one lung missing and the airway as a label, `missing_<n>.nii.gz`, and
`cases.csv`: all cases of the table, then the copies and the phantoms. Existing files are kept.
"""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.instruments import given_arguments
from medseg.anatomy.disease import KINDS, paint_disease, paint_fluid
from medseg.data.case_table import Case, read_case_table, split_cases, write_case_table
from medseg.data.sampler import sample_rng
from medseg.errors import UserError
from medseg.io.write import write_image, write_labels
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PHANTOM_LABELS, draw_spec
from medseg.preprocess.intensity import HU_LIMITS
from medseg.preprocess.scale import AS_STORED
from medseg.studies.pieces import oriented_image, oriented_labels

SIDES = (1, 2)  # label values of the left and the right lung
# Probabilities of disease and of fluid in each lung, by the number of the copy.
COPIES = {1: (0.8, 0.5), 2: (0.35, 0.8)}
# Copy n of a case has the stream of random numbers 10 + n; `cross_validate` paints with stream 0.
FIRST_STREAM = 10
AIRWAY = 3  # label value, as in `airway_labels.py`
PHANTOM_SEED = 300  # no other phantoms of this repository have it


def main() -> None:
    """Paint the copies, make the phantoms and write the table."""
    output, arguments = given_arguments(
        ["fold", "num_folds", "copies", "phantoms"], required=["cases"]
    )
    cases = read_case_table(Path(arguments["cases"]))
    fold = read_fold(arguments.get("fold", "0"))
    split = split_cases(cases, fold=fold, num_folds=int(arguments.get("num_folds", "5")))
    num_copies = int(arguments.get("copies", len(COPIES)))
    added = []
    for case in split.train:
        for number in list(COPIES)[:num_copies]:
            added += paint_copy(case, number, output)
        print(case.name, flush=True)
    for index in range(int(arguments.get("phantoms", "0"))):
        added.append(make_missing(index, output))
    write_case_table(output / "cases.csv", [*cases, *added])


def read_fold(text: str) -> int | str:
    """Read the fold of the command line: a number, or `all`.

    Raises:
        UserError: If it is neither.
    """
    if text == "all":
        return text
    if not text.isdecimal():
        raise UserError(f"fold={text}: expected the number of a fold or all")
    return int(text)


def paint_copy(case: Case, number: int, folder: Path) -> list[Case]:
    """Paint a copy of a case.

    Args:
        case: A CT with labels 1 (left lung) and 2 (right lung).
        number: Key of `COPIES`.
        folder: Where the files are written.

    Returns:
        The copy, in HU, in a list; an empty one if the case has no labels or shows no lung.
    """
    name = f"{case.name}_ill{number}"
    image_path = folder / f"{name}.nii.gz"
    labels_path = folder / f"{name}_labels.nii.gz"
    # The file of the copy holds HU, even if that of the case has another scale.
    copy = replace(case, name=name, image=image_path, labels=labels_path, series=None, hu=AS_STORED)
    if image_path.is_file() and labels_path.is_file():
        return [copy]
    if case.labels is None:
        return []
    labels_array, grid = oriented_labels(case)
    labels = torch.from_numpy(labels_array.astype(np.uint8))
    present = [value for value in SIDES if bool((labels == value).any())]
    if not present:
        return []
    stored_values, _ = oriented_image(case)
    image_hu = case.hu.apply(stored_values).astype(np.float32).clip(*HU_LIMITS)
    hu = torch.from_numpy(image_hu)
    # The seed makes the disease of a copy reproducible. `crc32`, since Python's `hash` of a text
    # differs between processes.
    disease_probability, fluid_probability = COPIES[number]
    rng = sample_rng(zlib.crc32(case.name.encode()), FIRST_STREAM + number)
    # Both functions paint into `hu` in place. First the disease of both lungs, then the fluid.
    for value in present:
        if rng.random() < disease_probability:
            paint_disease(hu, labels, value, list(KINDS), rng, grid.spacing_mm)
    for value in present:
        if rng.random() < fluid_probability:
            paint_fluid(hu, labels, value, rng, grid.spacing_mm)
    write_image(image_path, hu.round().to(torch.int16).numpy(), grid)
    write_labels(labels_path, labels.numpy(), grid)
    return [copy]


def make_missing(index: int, folder: Path) -> Case:
    """Make a phantom of a whole chest with one lung missing, its airway as a label.

    Args:
        index: Number of the phantom; the left lung is missing in the even ones.
        folder: Folder of the files.
    """
    name = f"missing_{index:03d}"
    image_path = folder / f"{name}.nii.gz"
    labels_path = folder / f"{name}_labels.nii.gz"
    side = ("left", "right")[index % 2]
    trust = {"left_lung": "reference", "right_lung": "reference"}
    trust[f"{side}_lung"] = "absent"
    case = Case(name, image_path, labels_path, patient=name, trust=trust)
    if image_path.is_file() and labels_path.is_file():
        return case
    spec = replace(draw_spec(PHANTOM_SEED, index), view="whole", missing_lung=side)
    phantom = make_phantom(spec)
    # `phantom.labels` has lungs only; `phantom.organs` also marks the airway.
    (airway_value,) = (value for value, part in PHANTOM_LABELS.items() if part == "airway")
    labels = phantom.labels.copy()
    labels[phantom.organs == airway_value] = AIRWAY
    write_image(image_path, phantom.image_hu, phantom.grid)
    write_labels(labels_path, labels, phantom.grid)
    return case


if __name__ == "__main__":
    main()
