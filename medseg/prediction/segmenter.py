"""Python API: load a cascade once, then segment any number of scans."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medseg.cascade.cascade import Segmentation, require_channels
from medseg.inference.options import InferenceOptions
from medseg.io.read import read_image
from medseg.io.volume import LazyVolume, Volume, load_image
from medseg.prediction.cascades import load_cascade
from medseg.prediction.case import read_scan, segment_scan
from medseg.preprocess.channels import place_channel
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.task import AIR_HU


class Segmenter:
    """A coarse and a fine stage of any task, loaded once.

    `segment` may be called from several threads: it changes nothing, and networks run one at a
    time, so that their memory is needed once.

    Args:
        coarse: Checkpoints or `.safetensors` files of the coarse stage, which are averaged.
        fine: The same for the fine stage; none for a task without regions.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; None = that of the training, fp32 where the
            device lacks it.
        options: Thresholds, memory budget and flips; the defaults where None.
        trusted: Prefixes of classes beyond the white list that a checkpoint may name, such as
            `my_package.`.

    Raises:
        UserError: If a file or the device is not usable.
    """

    def __init__(
        self,
        coarse: Sequence[str | Path],
        fine: Sequence[str | Path] = (),
        *,
        accelerator: str = "auto",
        precision: str | None = None,
        options: InferenceOptions | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        self.num_threads = torch.get_num_threads()
        self.cascade = load_cascade(
            coarse,
            fine,
            accelerator=accelerator,
            precision=precision,
            options=options,
            trusted=trusted,
        )

    def segment(self, scan: str | Path | Volume | Any, hu: HuScale = AS_STORED) -> Segmentation:
        """Segment one scan.

        Args:
            scan: Path of a volume file or a DICOM series, a `Volume`, or a `SimpleITK.Image`, a CT
                in HU; for a task of several channels a list of them, of which the others are
                resampled to the grid of the first.
            hu: Scale that turns the values into HU, where they are not HU yet.

        Returns:
            Labels on the grid of the scan, their volumes and warnings. `labels` is a
            `SimpleITK.Image` where one was given, else a `Volume` in the storage order of the scan,
            whose array is uint8 (D, H, W); `durations_s` also has `read` and `total`.

        Raises:
            UserError: If the scan cannot be read as one regular 3D volume, all its voxels have one
                value, or a channel is missing.
        """
        # A thread that starts while another one resamples may inherit a limit of one thread.
        torch.set_num_threads(self.num_threads)
        start_s = time.perf_counter()
        scans, task = (
            list(scan) if isinstance(scan, (list, tuple)) else [scan],
            self.cascade.task,
        )
        require_channels(task, len(scans))
        is_image = not isinstance(scans[0], (str, Path, Volume))
        name = (
            str(scans[0])
            if isinstance(scans[0], (str, Path))
            else "SimpleITK image"
            if is_image
            else "Volume"
        )
        paths = [Path(one) for one in scans if isinstance(one, (str, Path))]
        if len(paths) == len(scans):
            volume, more_channels = read_scan(paths, task, None, hu)
        else:
            volume, *others = (
                _to_volume(one, channel.modality)
                for one, channel in zip(scans, task.channels, strict=True)
            )
            more_channels, findings = [], list(volume.findings)
            for number, (other, channel) in enumerate(
                zip(others, task.channels[1:], strict=True), start=1
            ):
                placed, uncovered = place_channel(
                    other.array, other.grid, volume.grid, channel.outside, f"image_{number}"
                )
                more_channels.append(placed)
                findings += [
                    *uncovered,
                    *(finding.within(f"image_{number}") for finding in other.findings),
                ]
            volume = replace(volume, array=hu.apply(volume.array), findings=tuple(findings))
        read_s = time.perf_counter() - start_s
        # A `Volume` belongs to the caller.
        result = segment_scan(
            volume,
            name,
            self.cascade,
            more_channels,
            is_owned=not any(isinstance(one, Volume) for one in scans),
        )
        labels: Any = Volume(result.labels, volume.grid, volume.header)
        if is_image:
            from medseg.io.simpleitk import to_simpleitk

            labels = to_simpleitk(result.labels, scans[0])
        durations_s = {"read": read_s, **result.durations_s, "total": time.perf_counter() - start_s}
        return replace(result, labels=labels, durations_s=durations_s)


def _to_volume(scan: str | Path | Volume | Any, modality: str) -> Volume:
    """Read a path, as a scan of a modality, convert a `SimpleITK.Image`; a `Volume` is returned as it is, but for NaN and infinity."""
    air = AIR_HU if modality == "ct" else 0
    if isinstance(scan, Volume):
        if np.isfinite(scan.array).all():
            return scan
        lazy = LazyVolume(
            Path("Volume"),
            scan.grid,
            scan.array.dtype,
            lambda: map(np.ravel, scan.array),
            findings=scan.findings,
        )
        return replace(load_image(lazy, air), header=scan.header)
    if isinstance(scan, (str, Path)):
        return read_image(Path(scan), modality=modality)
    from medseg.io.simpleitk import from_simpleitk  # SimpleITK takes 50 MiB

    return from_simpleitk(scan, air)


class LungSegmenter(Segmenter):
    """The segmenter with the included weights where no checkpoints are given; label 1 is the left side, 2 the right."""

    def __init__(
        self, coarse: Sequence[str | Path] = (), fine: Sequence[str | Path] = (), **options: Any
    ) -> None:
        super().__init__(coarse, fine, **options)
