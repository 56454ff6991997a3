"""Python API: load a model once, then segment any number of scans."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medseg.cascade.cascade import require_channels
from medseg.errors import SeveralSeriesError, UserError
from medseg.inference.options import InferenceOptions
from medseg.inference.scan_model import ScanModel
from medseg.inference.segmentation import Segmentation
from medseg.io.arrays import from_array, from_nibabel, is_nibabel, to_nibabel
from medseg.io.read import read_image
from medseg.io.volume import LazyVolume, Volume, load_image
from medseg.options_check import check_options
from medseg.prediction.case import read_scan, segment_scan
from medseg.prediction.load_models import load_cascade, load_model_folders
from medseg.preprocess.channels import place_channel
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.task import AIR_HU, Task

# Number of axes of an array of several channels, as MONAI has them: (C, X, Y, Z).
CHANNEL_FIRST_AXES = 4


class Segmenter:
    """A model of any task, loaded once: a coarse and a fine stage, one stage, or a model folder.

    `segment` may be called from several threads: it changes no attribute, and networks run one at a
    time, so that the memory of a pass is needed once.

    Attributes:
        cascade: The model: a cascade, or in spite of the name the model of a folder.
        num_threads: Number of torch threads with which it was loaded.

    Args:
        coarse: Checkpoint or `.safetensors` file of the coarse stage, or several, which are
            averaged; none = the included weights.
        fine: The same for the fine stage; none for a task without regions.
        single: In place of both, one or several checkpoints of a model of one stage.
        weights: In place of all, a model folder or a list of them; see `load_model_folders`.
        folds: With `weights`, names or numbers of the folds to average; None = all.
        label_values: With `weights`, label name to value in the result; other labels count from 1
            in the order of the folders.
        ensemble: With several folders of nnU-Net in `weights`, whether their probabilities are
            averaged; else the labels of a later folder cover those of an earlier one.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; None = that of the training. Where the device
            lacks that format, fp16 on a GPU and fp32 on a CPU.
        options: Tiles, memory budget, backend and flips, without `max_ram_gib`; None = the
            defaults.
        trusted: Prefixes of classes beyond the white list that a checkpoint may name, such as
            `my_package.`.

    Raises:
        UserError: If a file or the device is not usable, or arguments exclude each other.
    """

    def __init__(
        self,
        coarse: str | Path | Sequence[str | Path] = (),
        fine: str | Path | Sequence[str | Path] = (),
        *,
        single: str | Path | Sequence[str | Path] = (),
        weights: str | Path | Sequence[str | Path] | None = None,
        folds: Sequence[str | int] | None = None,
        label_values: Mapping[str, int] | None = None,
        ensemble: bool = False,
        accelerator: str = "auto",
        precision: str | None = None,
        options: InferenceOptions | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        if options is not None:
            options = _checked_options(options)
        self.num_threads = torch.get_num_threads()
        self.cascade: ScanModel
        if weights is not None:
            if coarse or fine or single:
                raise UserError("weights and checkpoints exclude each other; leave one of them out")
            folders = _as_paths(weights)
            if not folders:
                raise UserError("weights: expected at least one model folder, but got none")
            fold_names = None if folds is None else [str(fold) for fold in folds]
            self.cascade = load_model_folders(
                folders,
                fold_names,
                label_values=label_values,
                ensemble=ensemble,
                accelerator=accelerator,
                precision=precision,
                options=options,
                trusted=trusted,
            )
            return
        if folds is not None or label_values is not None or ensemble:
            raise UserError("folds, label_values and ensemble need weights; leave them out")
        self.cascade = load_cascade(
            _as_paths(coarse),
            _as_paths(fine),
            _as_paths(single),
            accelerator=accelerator,
            precision=precision,
            options=options,
            trusted=trusted,
        )

    def segment(
        self, scan: str | Path | Volume | Any, hu: HuScale = AS_STORED, *, affine: Any = None
    ) -> Segmentation:
        """Segment one scan.

        Args:
            scan: Path of a volume file or a DICOM series, a `Volume`, an image of SimpleITK or
                nibabel, or an array or tensor (X, Y, Z); a CT in HU. In a folder of several DICOM
                series the path of one file chooses its series. For a task of several channels a
                list of them, or an array (C, X, Y, Z). The other channels are resampled to the grid
                of the first.
            hu: Scale that turns the values of the first channel into HU, if they are not HU yet.
            affine: Matrix (4, 4) of an array or tensor from its indices to RAS in mm; None for a
                tensor that has its own, as those of MONAI.

        Returns:
            Labels on the grid of the scan, their volumes and warnings. For a path or a `Volume`,
            `labels` is a `Volume` in the storage order of the scan, whose array is uint8 (D, H, W);
            else an object of the kind that was given. `durations_s` also has `read` and `total`.

        Raises:
            UserError: If the scan cannot be read as one regular 3D volume, all its voxels have one
                value, a channel is missing, or an array has no affine.
        """
        # Torch keeps this number for each thread. A thread of the caller that started while another
        # one resampled may have inherited a limit of one torch thread.
        torch.set_num_threads(self.num_threads)
        start_s = time.perf_counter()
        task = self.cascade.task
        channels = _channels_of(scan)
        require_channels(task, len(channels))
        first = channels[0]
        paths = [Path(channel) for channel in channels if isinstance(channel, (str, Path))]
        are_all_paths = len(paths) == len(channels)
        try:
            if are_all_paths:
                volume, more_channels = read_scan(paths, task, None, hu)
            else:
                volume, more_channels = _read_channels(channels, task, hu, affine)
        except SeveralSeriesError as error:
            # The cures of its message are those of the command line.
            raise UserError(
                f"{error} In Python, give one file of its series as the path."
            ) from error
        read_s = time.perf_counter() - start_s
        # The voxels of a `Volume` belong to the caller and must not be changed; those of all other
        # kinds were read or copied.
        is_owned = not any(isinstance(channel, Volume) for channel in channels)
        name = _name_of(first)
        result = segment_scan(
            volume, name, self.cascade, more_channels, is_owned=is_owned, scale=hu
        )
        labels = _like(first, Volume(result.labels, volume.grid, volume.header))
        total_s = time.perf_counter() - start_s
        durations_s = {"read": read_s, **result.durations_s, "total": total_s}
        return replace(result, labels=labels, durations_s=durations_s)


def _checked_options(options: InferenceOptions) -> InferenceOptions:
    """Refuse values that the command line refuses as well, and the bound on its process.

    Returns:
        The options, with the names of choices, such as `"openvino"`, converted.

    Raises:
        UserError: With the name of the option.
    """
    if not isinstance(options, InferenceOptions):
        raise UserError(f"options: expected InferenceOptions, but got {type(options).__name__}")
    # The bound is for a process that does nothing else, so it would have no effect here.
    if options.max_ram_gib is not None:
        raise UserError(
            "options: max_ram_gib bounds the process of the command predict; leave it out, or "
            "give budget_gib, the memory of a network pass"
        )
    checked = copy.copy(options)
    check_options(checked, "options")
    return checked


def _as_paths(paths: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    """Put a single path into a list."""
    if isinstance(paths, (str, Path)):
        return [paths]
    return paths


def _name_of(scan: str | Path | Volume | Any) -> str:
    """Name a scan in messages: its path, or its kind."""
    if isinstance(scan, (str, Path)):
        return str(scan)
    if isinstance(scan, Volume):
        return "Volume"
    if isinstance(scan, (np.ndarray, torch.Tensor)):
        return "array"
    return "nibabel image" if is_nibabel(scan) else "SimpleITK image"


def _channels_of(scan: str | Path | Volume | Any) -> list[Any]:
    """List the channels of a scan, see `Segmenter.segment`."""
    if isinstance(scan, (list, tuple)):
        return list(scan)
    if isinstance(scan, (np.ndarray, torch.Tensor)) and scan.ndim == CHANNEL_FIRST_AXES:
        return list(scan)
    return [scan]


def _like(scan: Any, labels: Volume) -> Any:
    """Convert labels to the kind of object that the scan is, see `Segmenter.segment`."""
    if isinstance(scan, (str, Path, Volume)):
        return labels
    # Arrays and tensors of the caller are (X, Y, Z), those of a `Volume` (Z, Y, X).
    if isinstance(scan, torch.Tensor):
        return torch.from_numpy(labels.array.transpose())
    if isinstance(scan, np.ndarray):
        return labels.array.transpose()
    if is_nibabel(scan):
        return to_nibabel(labels.array, scan)
    from medseg.io.simpleitk import to_simpleitk  # SimpleITK takes 50 MiB

    return to_simpleitk(labels.array, scan)


def _read_channels(
    channels: Sequence[str | Path | Volume | Any], task: Task, hu: HuScale, affine: Any
) -> tuple[Volume, list[np.ndarray]]:
    """Read the channels of a scan that are not all paths, see `Segmenter.segment`.

    Returns:
        The first channel in HU with the findings of all, and the arrays (D, H, W) of the others on
        its grid.
    """
    volumes = []
    for channel, channel_options in zip(channels, task.channels, strict=True):
        volumes.append(_to_volume(channel, channel_options.modality, affine))
    first = volumes[0]
    findings = list(first.findings)
    arrays = []
    for number in range(1, len(volumes)):
        other = volumes[number]
        name = f"image_{number}"  # its column in a case table
        outside = task.channels[number].outside
        # The findings say how much of the first channel the other one does not cover.
        placed, cover_findings = place_channel(other.array, other.grid, first.grid, outside, name)
        arrays.append(placed)
        findings += cover_findings
        findings += [finding.within(name) for finding in other.findings]
    first = replace(first, array=hu.apply(first.array), findings=tuple(findings))
    return first, arrays


def _to_volume(scan: str | Path | Volume | Any, modality: str, affine: Any = None) -> Volume:
    """Read a path, or convert an image, an array or a tensor.

    A `Volume` without NaN and infinity is returned as it is.

    Args:
        scan: One channel, see `Segmenter.segment`.
        modality: Its modality, as a task names it.
        affine: See `Segmenter.segment`.

    Raises:
        UserError: If it cannot be read, or is an array without an affine.
    """
    # Replaces NaN and infinity.
    air = AIR_HU if modality == "ct" else 0
    if isinstance(scan, Volume):
        is_finite = bool(np.isfinite(scan.array).all())
        if is_finite:
            return scan

        def read_slices() -> Iterator[np.ndarray]:
            return map(np.ravel, scan.array)

        # Read like a file, by `load_image`, which makes the replacement.
        lazy = LazyVolume(
            Path("Volume"), scan.grid, scan.array.dtype, read_slices, findings=scan.findings
        )
        return replace(load_image(lazy, air), header=scan.header)
    if isinstance(scan, (str, Path)):
        return read_image(Path(scan), modality=modality)
    if is_nibabel(scan):
        return from_nibabel(scan, air)
    if isinstance(scan, (np.ndarray, torch.Tensor)):
        if affine is None:
            affine = getattr(scan, "affine", None)  # tensors of MONAI have one
        if affine is None:
            raise UserError(
                "an array does not say where its voxels are; give affine=, index to RAS in mm"
            )
        if isinstance(scan, torch.Tensor):
            return from_array(_to_numpy(scan), affine, air)
        return from_array(scan, affine, air)
    from medseg.io.simpleitk import from_simpleitk  # SimpleITK takes 50 MiB

    return from_simpleitk(scan, air)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Bring a tensor to NumPy, which has no bf16: its values become float32."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


class LungSegmenter(Segmenter):
    """Segmenter under the name of the task of the included weights, which are its default.

    `Segmenter` does the same. With these weights label 1 is the left side, 2 the right.
    """

    def __init__(
        self,
        coarse: str | Path | Sequence[str | Path] = (),
        fine: str | Path | Sequence[str | Path] = (),
        **options: Any,
    ) -> None:
        super().__init__(coarse, fine, **options)
