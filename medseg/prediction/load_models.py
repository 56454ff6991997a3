"""Models of a prediction: cascades and model folders, and the choice of one by a scan's spacing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stages
from medseg.cascade.stage import TrainedStage
from medseg.errors import UserError
from medseg.inference.options import InferenceOptions, Seen
from medseg.inference.scan_model import ScanModel
from medseg.memory.device import pick_device
from medseg.memory.options import Accelerator
from medseg.memory.precision import check_precision
from medseg.nnunet.ensemble import NnunetEnsemble
from medseg.nnunet.model import NnunetModel, load_nnunet
from medseg.prediction.joined import JoinedModels
from medseg.prediction.memory_limit import backend_room_bytes
from medseg.prediction.options import EVERY_SPACING_MM
from medseg.prediction.scans import Scan, scan_grid
from medseg.prediction.totalsegmentator import TotalsegmentatorModel, isotropic_mm
from medseg.weights.files import shipped_weights
from medseg.weights.included import INCLUDED_TASK, TILE_WARNING
from medseg.weights.model_folder import find_stages, is_weights_folder


class RangeModel(NamedTuple):
    """A model and the range of spacings that it is for.

    Attributes:
        model: A cascade, or the model of a folder.
        settings: Everything beside the scan that decides the result, in plain types.
        name: Name of the range in `by_spacing`; empty where one model serves all scans.
        range_mm: Range of the coarsest spacing of a scan, from the first number to below the
            second.
    """

    model: ScanModel
    settings: dict[str, Any]
    name: str = ""
    range_mm: tuple[float, float] = EVERY_SPACING_MM

    def __str__(self) -> str:
        """Write the range for a message."""
        low_mm, high_mm = self.range_mm
        return f"{low_mm:g} … {high_mm:g} mm"


def load_cascade(
    coarse: Sequence[str | Path] | None,
    fine: Sequence[str | Path] | None,
    single: Sequence[str | Path] | None = None,
    *,
    accelerator: str = "auto",
    precision: str | None = None,
    options: InferenceOptions | None = None,
    trusted: Sequence[str] = (),
) -> Cascade:
    """Load both stages of a cascade, or a model of one stage.

    Args:
        coarse: Checkpoints or `.safetensors` files of the coarse stage, which are averaged; none =
            the included weights.
        fine: The same for the fine stage; none also for a task without regions.
        single: Checkpoints of a model of one stage, in place of `coarse` and `fine`.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; None = that of the training, fp32 where a CPU
            lacks it. A GPU without bf16 computes in fp16 instead.
        options: Tiles of the last stage, memory, backend and flips; None = the defaults. If no
            backend is named, it is torch; on a CPU without bf16 it is OpenVINO if that is quicker
            and its memory fits.
        trusted: Prefixes of classes beyond the white list that a checkpoint may name.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable, or the stages do not
            fit together.
    """
    device = _device_of(accelerator)
    if precision is not None:
        try:
            check_precision(precision, device.type)
        except ValueError as error:
            raise UserError(f"precision={precision}: {error}") from error
    options = options or InferenceOptions()
    # Keys that only models of nnU-Net use.
    for key in ("sums", "orientation", "around"):
        if getattr(options, key) is not None:
            raise UserError(
                f"inference.{key} belongs to a model folder of nnU-Net; "
                "give one as weights=<folder>, or leave it out"
            )
    stages_to_load = [("coarse", coarse), ("fine", fine)]
    if single:
        stages_to_load = [("single", single)]
    stages = _load_in_order(stages_to_load, device, precision, trusted, options)
    if options.tile_size is not None:
        # The warning states a measurement with the included weights, so only they get it.
        checkpoints_of_last = fine if len(stages) > 1 else coarse
        is_included = not single and not checkpoints_of_last
        warning = TILE_WARNING if is_included else ""
        stages[-1].use_tiles(options.tile_size, warning)
    for stage in stages:
        if stage.tile_size is not None:
            # The plan is not used: it is made to refuse a tile that exceeds the budget, before any
            # scan is read.
            stage.plan(stage.tile_size, options)
    fine_stage = stages[1] if len(stages) > 1 else None
    return Cascade(stages[0], fine_stage, options)


def _load_in_order(
    checkpoints_by_stage: Sequence[tuple[str, Sequence[str | Path] | None]],
    device: torch.device,
    precision: str | None,
    trusted: Sequence[str],
    options: InferenceOptions,
) -> list[TrainedStage]:
    """Load the coarse and the fine stage, or the single one; see `load_cascade`.

    Args:
        checkpoints_by_stage: Name and checkpoints of each stage, the coarse one first. A stage
            without checkpoints gets the included weights.
        device: Device of the networks.
        precision: See `load_cascade`.
        trusted: See `load_cascade`.
        options: See `load_cascade`.

    Raises:
        UserError: If a checkpoint is not usable, or of another stage.
    """
    stages: list[TrainedStage] = []
    for name, checkpoints in checkpoints_by_stage:
        # `coarse=` may name a checkpoint of a single stage, whose task has no regions. Then there
        # is no fine stage, not even that of the included weights.
        has_no_fine = bool(stages) and stages[0].name != "coarse"
        if has_no_fine and not checkpoints:
            continue
        paths = [Path(path) for path in checkpoints or ()]
        if not paths:
            paths = [shipped_weights(INCLUDED_TASK, name)]
        # The process does not hold the memory of the backends of earlier stages yet, since OpenVINO
        # takes it only with the first pass.
        room_bytes = backend_room_bytes(options.max_ram_gib, options.budget_gib)
        room_bytes -= sum(stage.backend_bytes for stage in stages)
        stages.append(load_stages(paths, name, device, precision, trusted, options, room_bytes))
        if name == "single" and stages[0].name != "single":
            raise UserError(
                f"single={paths[0]}: this is the coarse stage of a cascade; "
                "give it as coarse=, and its fine stage as fine="
            )
    return stages


def load_model_folders(
    weights: Sequence[str | Path],
    folds: Sequence[str] | None = None,
    *,
    label_values: Mapping[str, int] | None = None,
    ensemble: bool = False,
    accelerator: str = "auto",
    precision: str | None = None,
    options: InferenceOptions | None = None,
    trusted: Sequence[str] = (),
) -> ScanModel:
    """Load model folders; the labels of a later one are painted over those of an earlier one.

    Args:
        weights: For each model a folder of medseg or nnU-Net, the parent of a folder of nnU-Net, or
            the zip file of nnU-Net's export.
        folds: Names of the folds to average; None = all.
        label_values: Label name to value; other labels count from 1 in the order of the folders.
        ensemble: Whether the probabilities of the folders, all of nnU-Net, are averaged; else the
            labels are painted.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: See `load_cascade`; for a folder of nnU-Net see `load_nnunet`.
        options: Keys of `inference`; the defaults where None.
        trusted: See `load_cascade`, for a folder of medseg.

    Raises:
        UserError: If the device, a folder or an option cannot be used, or the models do not go
            together.
    """
    options = options or InferenceOptions()
    nnunet_options = options
    if options.around is not None:
        if options.orientation is not None:
            raise UserError(
                f"inference.orientation={options.orientation}: inference.around={options.around} "
                "turns scans to RAS; leave one of them out"
            )
        # `TotalsegmentatorModel` turns scans to RAS. With this orientation nnU-Net's models do not
        # turn them again.
        nnunet_options = replace(options, orientation=Seen.RAS)
    models: list[ScanModel] = []
    folders = [Path(folder) for folder in weights]
    for folder in folders:
        if is_weights_folder(folder):
            stages = find_stages(folder, folds)
            models.append(
                load_cascade(
                    stages.get("coarse"),
                    stages.get("fine"),
                    stages.get("single"),
                    accelerator=accelerator,
                    precision=precision,
                    options=options,
                    trusted=trusted,
                )
            )
            continue
        device = _device_of(accelerator)
        models.append(load_nnunet(folder, folds, device, nnunet_options, precision))
    names = _distinct_names(folders)
    parts = tuple(models)
    if ensemble:
        parts = (_ensemble_of(names, models),)
        names = ("ensemble",)
    model = parts[0]
    # `JoinedModels` also replaces label values, so it is used for a single model too.
    if len(parts) > 1 or label_values:
        model = JoinedModels(parts, names, label_values or {})
    if options.around is None:
        return model
    return TotalsegmentatorModel((model,), isotropic_mm(models))


def _ensemble_of(names: Sequence[str], models: Sequence[ScanModel]) -> NnunetEnsemble:
    """Join models of nnU-Net whose probabilities are averaged.

    Raises:
        UserError: If one is not of nnU-Net, or they do not go together.
    """
    members: list[NnunetModel] = []
    for name, model in zip(names, models, strict=True):
        if not isinstance(model, NnunetModel):
            raise UserError(
                f"ensemble=true averages model folders of nnU-Net, but {name} is one of medseg; "
                "leave it out"
            )
        members.append(model)
    return NnunetEnsemble(tuple(members))


def _distinct_names(folders: Sequence[Path]) -> tuple[str, ...]:
    """Name folders by their last part where that tells them apart, else by their paths."""
    names = tuple(folder.name for folder in folders)
    if len(set(names)) == len(names):
        return names
    return tuple(str(folder) for folder in folders)


def _device_of(accelerator: str) -> torch.device:
    """Pick the device by the name of an accelerator.

    Raises:
        UserError: If there is no such accelerator.
    """
    names = [choice.value for choice in Accelerator]
    if accelerator not in names:
        raise UserError(f"accelerator={accelerator}: choose one of {', '.join(names)}")
    return pick_device(Accelerator(accelerator), "accelerator")


def check_one_task(range_models: Sequence[RangeModel]) -> None:
    """Refuse ranges of spacings whose models make different labels or take different channels.

    The same value would mean one organ in one scan of a batch, and another in the next.

    Raises:
        UserError: Names two such ranges and their tasks.
    """
    first = range_models[0]
    first_task = first.model.task
    first_modalities = [channel.modality for channel in first_task.channels]
    for other in range_models[1:]:
        task = other.model.task
        modalities = [channel.modality for channel in task.channels]
        if task.labels != first_task.labels or modalities != first_modalities:
            raise UserError(
                f"by_spacing: the checkpoints of {first.name} are of the task {first_task.name}, "
                f"those of {other.name} of {task.name}, and their labels or channels differ; give "
                "checkpoints of one task"
            )


def pick_model(scan: Scan, range_models: Sequence[RangeModel]) -> tuple[RangeModel, list[str]]:
    """Choose the model of a scan by its coarsest spacing.

    Returns:
        The model; and a list of one sentence that explains the choice, empty where there is none.

    Raises:
        UserError: If no range covers the scan, or its header cannot be read.
    """
    if not range_models[0].name:
        return range_models[0], []
    # All ranges have the channels of one task.
    grid = scan_grid(scan, range_models[0].model.task)
    # Headers store float32, from which 5 mm may be computed as 4.9999998: rounded, it does not fall
    # out of a range that begins at 5 mm.
    spacing_mm = round(max(grid.spacing_mm), 3)
    for candidate in range_models:
        low_mm, high_mm = candidate.range_mm
        if low_mm <= spacing_mm < high_mm:
            sentence = (
                f"uses by_spacing.{candidate.name}, since its coarsest spacing of "
                f"{spacing_mm:g} mm lies in {candidate}"
            )
            return candidate, [sentence]
    ranges = ", ".join(f"{candidate.name} {candidate}" for candidate in range_models)
    raise UserError(
        f"its coarsest spacing of {spacing_mm:g} mm lies in no range of by_spacing ({ranges}); "
        "give checkpoints for it, or widen a range"
    )


def result_settings(model: ScanModel, precision: str | None) -> dict[str, Any]:
    """List the settings that decide the result of a model for a scan, in plain types.

    These are the checkpoints by content, the precision, and the inference options except for the
    memory, which changes no label.
    """
    checksums = {name: sorted(files.values()) for name, files in model.checkpoints.items()}
    inference_options = asdict(model.options)
    for memory_key in ("budget_gib", "max_ram_gib"):
        del inference_options[memory_key]
    return {**checksums, "precision": precision, "inference": inference_options}
