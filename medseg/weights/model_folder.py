"""Model folder of medseg: the networks of all stages and folds, their checksums and a model card.

    SHA256SUMS                               checksum and name of each file of weights
    <task>_<stage>.safetensors               network of a stage, trained on all cases; or instead
    <task>_<stage>_fold_<k>.safetensors      network of a stage and fold; their outputs are averaged
    README.md                                model card
    clean_up.csv, clean_up.md                how a cross-validation chose the clean-up

The metadata of each file of weights hold the other values that a prediction needs: configuration,
clean-up, label names, plausible volumes, bound on Dice and versions. The included weights are in
such a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from medseg.console import say
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table
from medseg.io.text import read_text
from medseg.task import CleanUp
from medseg.weights.files import (
    CHECKSUMS,
    STAGES,
    SUFFIX,
    checksum,
    read_checksums,
    write_weights,
)
from medseg.wording import shell_line

# File of a model folder with the model card.
CARD = "README.md"
ALL = "all"
"""Stands in place of a fold for a network that was trained on all cases."""

# Columns of the tables in a model card: key to heading.
LABEL_COLUMNS = {"label": "label", "value": "value", "volume_ml": "plausible volume, ml"}
NETWORK_COLUMNS = {
    "file": "file",
    "spacing_mm": "spacing, mm",
    "num_weights": "weights",
    "sha256": "SHA-256",
}

# Groups: task, stage, fold. The first group is greedy, so that the stage is the last one in the
# name: a task may be called `lesion_fine_fold_1`.
_FILE_NAME = re.compile(rf"(.+)_({'|'.join(STAGES)})(?:_fold_(\w+))?{re.escape(SUFFIX)}")


class StageWeights(NamedTuple):
    """Trained network of a stage.

    Attributes:
        metadata: From `medseg.training.assemble.make_metadata`.
        weights: Weights by name.
        fold: Number of the fold as text, or `ALL`.
    """

    metadata: dict[str, Any]
    weights: dict[str, Tensor]
    fold: str = ALL

    @property
    def file_name(self) -> str:
        """Name of the file in a model folder."""
        fold_part = "" if self.fold == ALL else f"_fold_{self.fold}"
        return f"{self.metadata['task']['name']}_{self.metadata['stage']}{fold_part}{SUFFIX}"


def is_weights_folder(path: Path) -> bool:
    """Whether a path is a model folder of medseg."""
    return (path / CHECKSUMS).is_file()


def find_stages(folder: Path, folds: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """Find the files of each stage, and compare their checksums.

    Args:
        folder: The model folder.
        folds: Numbers of the folds to average, as text; None = all folds or, in a folder without
            folds, the network that was trained on all cases.

    Returns:
        Name of each stage to the files of its folds, in the order in which the stages run.

    Raises:
        UserError: If a file is missing, damaged or unknown, or a stage lacks a fold.
    """
    source = f"weights={folder}"
    # Stage to fold to file.
    files: dict[str, dict[str, Path]] = {}
    tasks = set[str]()
    for name, expected_checksum in read_checksums(folder / CHECKSUMS).items():
        match = _FILE_NAME.fullmatch(name)
        # A name with folders in it must not lead out of the model folder.
        if match is None or Path(name).name != name:
            raise UserError(
                f"{source}: {CHECKSUMS} names {name[:100]!r}, expected <task>_<stage>{SUFFIX} with "
                f"the stage {', '.join(STAGES)}; take another copy"
            )
        path = folder / name
        if not path.is_file() or checksum(path) != expected_checksum:
            raise UserError(
                f"{source}: {name} is missing or damaged (its checksum is not that of "
                f"{CHECKSUMS}); copy the folder again"
            )
        task, stage, fold = match.groups(default=ALL)
        tasks.add(task)
        files.setdefault(stage, {})[fold] = path
    if len(tasks) != 1 or set(files) not in ({"single"}, {"coarse", "fine"}):
        raise UserError(
            f"{source}: expected the stages coarse and fine, or single, of one task, got "
            f"{', '.join(files) or 'none'} of {', '.join(sorted(tasks)) or 'none'}; "
            "copy the folder again"
        )
    # In the order of the alphabet, `coarse` comes before `fine`, as in a prediction.
    return {stage: _choose_folds(files[stage], stage, folds, source) for stage in sorted(files)}


def _choose_folds(
    files: Mapping[str, Path], stage: str, folds: Sequence[str] | None, source: str
) -> list[Path]:
    """List the files of the folds of a stage.

    Args:
        files: Fold to file.
        stage: Name of the stage, for messages.
        folds: See `find_stages`.
        source: Key and value of the user, for messages.

    Returns:
        The files in the order of `folds`; a fold that is named twice counts once.
    """
    if folds is None:
        numbered_folds = [fold for fold in files if fold != ALL]
        # Shorter numbers first: fold 10 comes after fold 2.
        numbered_folds.sort(key=lambda fold: (len(fold), fold))
        folds = numbered_folds or [ALL]
    for fold in folds:
        if fold not in files:
            raise UserError(
                f"folds={','.join(folds)}: the {stage} stage of {source} has no fold {fold}; "
                f"it has {', '.join(files)}"
            )
    return [files[fold] for fold in dict.fromkeys(folds)]


def write_model_folder(
    folder: Path,
    networks: Sequence[StageWeights],
    sections: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> list[Path]:
    """Write the networks of all stages and folds with their checksums, and a model card.

    An existing card is kept, because somebody may have edited it; if it lacks a checksum of the new
    files, a message says so.

    Args:
        folder: An existing folder.
        networks: Networks of one task, the last stage last.
        sections: Further sections of the card: heading to text in Markdown.
        arguments: Arguments that `predict` needs beside the folder, for the command in the card.

    Returns:
        The files of weights.
    """
    checksums: dict[str, str] = {}
    for network in networks:
        path = folder / network.file_name
        checksums[path.name] = write_weights(path, network.metadata, network.weights)
    lines = [f"{value}  {name}\n" for name, value in checksums.items()]
    replace_text(folder / CHECKSUMS, "".join(lines))
    card = folder / CARD
    if not card.is_file():
        replace_text(card, model_card(networks, checksums, sections or {}, arguments))
    elif not all(value in read_text(card) for value in checksums.values()):
        say(f"{card}: kept, but it names other files; correct it, or remove it for a new one")
    return [folder / name for name in checksums]


def model_card(
    networks: Sequence[StageWeights],
    checksums: Mapping[str, str],
    sections: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> str:
    """Write the model card of a folder in Markdown, from the metadata of its networks.

    Args:
        networks: See `write_model_folder`.
        checksums: SHA-256 by file name.
        sections: See `write_model_folder`.
        arguments: See `write_model_folder`.
    """
    command = "medseg predict -i <scan> -o labels.nii.gz weights=<this folder>"
    if arguments:
        command += f" {shell_line(arguments)}"
    # All networks have the same task. The last stage makes the final labels, so the clean-up and
    # the bound on Dice in its metadata are those that apply. Metadata of older versions lack some
    # keys, hence `get`.
    last_metadata = networks[-1].metadata
    task = last_metadata["task"]
    modalities = [channel["modality"] for channel in task.get("channels", [])]
    lines = [
        f"# Model card: {task['name']}",
        "",
        f"    {command}",
        "",
        "**Research software, not a medical device.** Not for diagnosis or treatment.",
        "",
        f"Input: {', '.join(modalities) or 'not stated'}.",
        "",
        markdown_table(_label_rows(task), LABEL_COLUMNS),
    ]
    network_rows = []
    for network in networks:
        network_rows.append(_network_row(network, checksums[network.file_name]))
    packages = last_metadata.get("versions", {})
    versions = ", ".join(f"{package} {version}" for package, version in packages.items())
    lines.append(markdown_table(network_rows, NETWORK_COLUMNS))
    lines += [f"Clean-up: {_clean_up_text(last_metadata)}.", "", _bound_sentence(networks)]
    lines += ["", f"Trained with {versions or 'unknown versions'}.", ""]
    for heading, text in sections.items():
        lines += [f"## {heading}", "", text]
    lines.append("Training cases and known failures: to be added by whoever trained it.")
    return "\n".join(lines) + "\n"


def _label_rows(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of the table of labels, each with its range of plausible volumes."""
    ranges_ml = task.get("volume_ml", {})
    # The range of a label may be stated under the name of a region that has this label only.
    region_of_label = {}
    for region in task.get("regions", []):
        if len(region["labels"]) == 1:
            region_of_label[region["labels"][0]] = region["name"]
    rows = []
    for label, value in task.get("labels", {}).items():
        range_ml = ranges_ml.get(label)
        if range_ml is None and label in region_of_label:
            range_ml = ranges_ml.get(region_of_label[label])
        range_text = "not stated"
        if range_ml is not None:
            low_ml, high_ml = range_ml
            range_text = f"{low_ml:g} to {high_ml:g}"
        rows.append({"label": label, "value": value, "volume_ml": range_text})
    return rows


def _network_row(network: StageWeights, sha256: str) -> dict[str, Any]:
    """Make the row of a network in the table of files."""
    spacing_mm = network.metadata.get("spacing_mm", "not stated")
    # The spacing may also be the text `not stated`, or `native` for a stage that does not resample.
    if not isinstance(spacing_mm, str):
        spacing_mm = "×".join(f"{mm:g}" for mm in spacing_mm)
    num_weights = sum(tensor.numel() for tensor in network.weights.values())
    return {
        "file": network.file_name,
        "spacing_mm": spacing_mm,
        "num_weights": num_weights,
        "sha256": f"`{sha256}`",
    }


def _clean_up_text(metadata: Mapping[str, Any]) -> str:
    """Say which components are removed from the labels, and which holes are filled."""
    steps = []
    least_hu = metadata["task"].get("least_hu")
    if least_hu is not None:
        steps.append(f"components with a median below {least_hu:g} HU go")
    for arguments in metadata.get("clean_up", ()):
        clean_up = CleanUp(**arguments)
        # The label or region, then the step, such as `holes are filled`.
        steps.append(f"{clean_up.part}: {clean_up}")
    return "; ".join(steps) or "none"


def _bound_sentence(networks: Sequence[StageWeights]) -> str:
    """Say on how many patients the bound on Dice was calibrated, or why there is none."""
    last_metadata = networks[-1].metadata
    last_stage = last_metadata["stage"]
    bound = last_metadata.get("dice_bound")
    if last_stage == "single":
        return "Bound on Dice: none; it rests on the agreement of two stages."
    if bound is None:
        # The least number of patients with which `calibrate` reaches the level 0.9.
        return "Bound on Dice: none was calibrated; that takes a cross-validation of 9 patients."
    sentence = (
        f"Bound on Dice: calibrated on {bound['num_patients']} patients to hold for "
        f"{bound['level']:g} of new patients; reports state it as `dice_at_least`."
    )
    num_folds = sum(network.metadata["stage"] == last_stage for network in networks)
    if num_folds > 1:
        sentence += " It holds for the networks of one fold (`folds=[0]`), not for their average."
    return sentence
