"""Model folder of medseg: the networks of all stages and folds, their checksums and a model card.

    SHA256SUMS                               checksum and name of each file of weights
    <task>_<stage>.safetensors               network of a stage, trained on all cases
    <task>_<stage>_fold_<k>.safetensors      or networks of folds, whose outputs are averaged
    README.md                                model card
    clean_up.csv, clean_up.md                how a cross-validation chose the clean-up

Each file of weights holds everything else as its metadata: configuration, clean-up, label names,
plausible volumes, bound on Dice and versions. The included weights lie in such a folder.
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

CARD = "README.md"
ALL = "all"
"""Fold of a network that was trained on all cases."""

# The stage is the last one in the name, because a task may be called `lesion_fine_fold_1`.
_NAME = re.compile(rf"(.+)_({'|'.join(STAGES)})(?:_fold_(\w+))?{re.escape(SUFFIX)}")


class StageWeights(NamedTuple):
    """Network of a stage.

    Attributes:
        metadata: What `medseg.training.assemble.make_metadata` describes.
        weights: Its weights by name.
        fold: Number of its fold, or `ALL`.
    """

    metadata: dict[str, Any]
    weights: dict[str, Tensor]
    fold: str = ALL

    @property
    def file_name(self) -> str:
        """Name of its file."""
        fold = "" if self.fold == ALL else f"_fold_{self.fold}"
        return f"{self.metadata['task']['name']}_{self.metadata['stage']}{fold}{SUFFIX}"


def is_weights_folder(path: Path) -> bool:
    """Whether a path is a model folder of medseg."""
    return (path / CHECKSUMS).is_file()


def find_stages(folder: Path, folds: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """Find the files of each stage, and compare their checksums.

    Args:
        folder: The model folder.
        folds: Names of the folds to average; None = all folds or, in a folder without folds, the
            network that was trained on all cases.

    Returns:
        Name of each stage to its files, the first stage first.

    Raises:
        UserError: If a file is missing, damaged or unknown, or a stage lacks a fold.
    """
    source = f"weights={folder}"
    files: dict[str, dict[str, Path]] = {}
    tasks = set[str]()
    for name, expected in read_checksums(folder / CHECKSUMS).items():
        match = _NAME.fullmatch(name)
        if match is None or Path(name).name != name:
            raise UserError(
                f"{source}: {CHECKSUMS} names {name[:100]!r}, expected <task>_<stage>{SUFFIX} with "
                f"the stage {', '.join(STAGES)}; take another copy"
            )
        path = folder / name
        if not path.is_file() or checksum(path) != expected:
            raise UserError(
                f"{source}: {name} is missing or damaged (its checksum is not that of "
                f"{CHECKSUMS}); copy the folder again"
            )
        tasks.add(match[1])
        files.setdefault(match[2], {})[match[3] or ALL] = path
    if len(tasks) != 1 or set(files) not in ({"single"}, {"coarse", "fine"}):
        raise UserError(
            f"{source}: expected the stages coarse and fine, or single, of one task, got "
            f"{', '.join(files) or 'none'} of {', '.join(sorted(tasks)) or 'none'}; "
            "copy the folder again"
        )
    return {stage: _choose_folds(files[stage], stage, folds, source) for stage in sorted(files)}


def _choose_folds(
    files: Mapping[str, Path], stage: str, folds: Sequence[str] | None, source: str
) -> list[Path]:
    """Files of the folds of a stage, in the order of `folds`; a repeated fold counts once."""
    if folds is None:
        numbered = [name for name in files if name != ALL]
        # By number: fold 10 comes after fold 2.
        folds = sorted(numbered, key=lambda name: (len(name), name)) or [ALL]
    for name in folds:
        if name not in files:
            raise UserError(
                f"folds={','.join(folds)}: the {stage} stage of {source} has no fold {name}; "
                f"it has {', '.join(files)}"
            )
    return [files[name] for name in dict.fromkeys(folds)]


def write_model_folder(
    folder: Path,
    networks: Sequence[StageWeights],
    sections: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> list[Path]:
    """Write the networks of all stages and folds with their checksums, and a model card.

    A card that is there is kept: it may hold what only people know.

    Args:
        folder: The folder, which is there.
        networks: Networks of one task.
        sections: Heading to text in Markdown, which the card has beside what the files hold.
        arguments: What `predict` needs beside the folder, for the command in the card.

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
    """Describe a model folder in Markdown by the metadata of its networks.

    Args:
        networks: All of them.
        checksums: SHA-256 by file name.
        sections: Heading to further text in Markdown.
        arguments: What `predict` needs beside the folder.
    """
    command = ["medseg predict -i <scan> -o labels.nii.gz weights=<this folder>", *arguments]
    # The task is the same in all. Clean-up and bound follow the final labels, which the last stage
    # makes.
    last = networks[-1].metadata
    task = last["task"]
    ranges_ml = task.get("volume_ml", {})
    # A range may be stated for the region that a label is alone in.
    region_of = {}
    for region in task.get("regions", []):
        if len(region["labels"]) == 1:
            region_of[region["labels"][0]] = region["name"]
    # Older metadata lack some of the keys.
    modalities = [channel["modality"] for channel in task.get("channels", [])]
    lines = [
        f"# Model card: {task['name']}",
        "",
        f"    {' '.join(command)}",
        "",
        "**Research software, not a medical device.** Not for diagnosis or treatment.",
        "",
        f"Input: {', '.join(modalities) or 'not stated'}.",
        "",
        "| label | value | plausible volume, ml |",
        "|---|--:|---|",
    ]
    for name, value in task.get("labels", {}).items():
        volume_ml = ranges_ml.get(name) or ranges_ml.get(region_of.get(name))
        lines.append(f"| {name} | {value} | {_range(volume_ml)} |")
    lines += ["", "| file | spacing, mm | weights | SHA-256 |", "|---|---|--:|---|"]
    for network in networks:
        lines.append(_network_row(network, checksums[network.file_name]))
    versions = ", ".join(f"{name} {version}" for name, version in last.get("versions", {}).items())
    lines += ["", f"Clean-up: {_clean_up_text(last)}.", "", _bound_sentence(networks)]
    lines += ["", f"Trained with {versions or 'unknown versions'}.", ""]
    for heading, text in sections.items():
        lines += [f"## {heading}", "", text]
    lines.append("Training cases and known failures: to be added by whoever trained it.")
    return "\n".join(lines) + "\n"


def _range(volume_ml: Sequence[float] | None) -> str:
    """Write a range of plausible volumes."""
    if volume_ml is None:
        return "not stated"
    return f"{volume_ml[0]:g} to {volume_ml[1]:g}"


def _network_row(network: StageWeights, sha256: str) -> str:
    """Write the row of a network in the table of files."""
    spacing_mm = network.metadata.get("spacing_mm", "not stated")
    # A stage that does not resample states a word.
    if not isinstance(spacing_mm, str):
        spacing_mm = "×".join(f"{mm:g}" for mm in spacing_mm)
    num_weights = sum(value.numel() for value in network.weights.values())
    return f"| {network.file_name} | {spacing_mm} | {num_weights} | `{sha256}` |"


def _clean_up_text(metadata: Mapping[str, Any]) -> str:
    """Say what is removed from the labels, and filled."""
    steps = []
    least_hu = metadata["task"].get("least_hu")
    if least_hu is not None:
        steps.append(f"components with a median below {least_hu:g} HU go")
    for values in metadata.get("clean_up", ()):
        clean_up = CleanUp(**values)
        steps.append(f"{clean_up.part}: {clean_up}")
    return "; ".join(steps) or "none"


def _bound_sentence(networks: Sequence[StageWeights]) -> str:
    """Say for whom a bound on Dice is stated, or why there is none."""
    last = networks[-1].metadata
    bound = last.get("dice_bound")
    if last["stage"] == "single":
        return "Bound on Dice: none; it rests on the agreement of two stages."
    if bound is None:
        return "Bound on Dice: none was calibrated; that takes a cross-validation of 9 patients."
    sentence = (
        f"Bound on Dice: calibrated on {bound['num_patients']} patients for a share of "
        f"{bound['level']:g}; reports state it as `dice_at_least`."
    )
    num_folds = sum(network.metadata["stage"] == last["stage"] for network in networks)
    if num_folds > 1:
        sentence += " It holds for the networks of one fold (`folds=[0]`), not for their average."
    return sentence
