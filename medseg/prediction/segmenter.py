"""Python API: load a cascade once, then segment any number of scans."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medseg.cascade.cascade import Segmentation
from medseg.cascade.stage import CascadeOptions
from medseg.io.read import read_image
from medseg.io.volume import Volume
from medseg.prediction.cascades import load_cascade
from medseg.prediction.case import segment_scan
from medseg.preprocess.scale import AS_STORED, HuScale


class Segmenter:
    """A coarse and a fine stage of any task, loaded once.

    `segment` may be called from several threads: it changes nothing, and networks run one at a time, so that their memory is needed once.

    Args:
        coarse: Checkpoints or `.safetensors` files of the coarse stage, which are averaged.
        fine: The same for the fine stage.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; None = that of the training, fp32 where the device lacks it.
        options: Thresholds, memory budget and flips; the defaults where None.
        trusted: Prefixes of classes beyond the white list that a checkpoint may name, such as `my_package.`.

    Raises:
        UserError: If a file or the device is not usable.
    """

    def __init__(
        self,
        coarse: Sequence[str | Path],
        fine: Sequence[str | Path],
        *,
        accelerator: str = "auto",
        precision: str | None = None,
        options: CascadeOptions | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        self.num_threads = torch.get_num_threads()
        self.cascade = load_cascade(coarse, fine, accelerator=accelerator, precision=precision, options=options, trusted=trusted)

    def segment(self, scan: str | Path | Volume | Any, hu: HuScale = AS_STORED) -> Segmentation:
        """Segment one scan.

        Args:
            scan: Path of a volume file or a DICOM series, a `Volume` in HU, or a `SimpleITK.Image` in HU.
            hu: Scale that turns the values into HU, where they are none.

        Returns:
            Labels on the grid of the scan, their volumes and warnings. `labels` is a `SimpleITK.Image` where one was given, else a
            `Volume` in the storage order of the scan, whose array is uint8 (D, H, W); `durations_s` also has `read` and `total`.

        Raises:
            UserError: If the scan cannot be read as one regular 3D volume, or all its voxels have one value.
        """
        # A thread that starts while another one resamples may inherit a limit of one thread.
        torch.set_num_threads(self.num_threads)
        start_s = time.perf_counter()
        is_image = not isinstance(scan, (str, Path, Volume))
        if isinstance(scan, (str, Path)):
            name, volume = str(scan), read_image(Path(scan))
        elif isinstance(scan, Volume):
            name, volume = "Volume", scan
        else:
            from medseg.io.simpleitk import from_simpleitk, to_simpleitk  # SimpleITK takes 50 MiB

            name, volume = "SimpleITK image", from_simpleitk(scan)
        read_s = time.perf_counter() - start_s
        result = segment_scan(volume, name, hu, self.cascade)
        labels: Any = to_simpleitk(result.labels, scan) if is_image else Volume(result.labels, volume.grid, volume.header)
        durations_s = {"read": read_s, **result.durations_s, "total": time.perf_counter() - start_s}
        return replace(result, labels=labels, durations_s=durations_s)


class LungSegmenter(Segmenter):
    """The segmenter of the lungs, with the included weights where no checkpoints are given; label 1 is the left lung, 2 the right."""

    def __init__(self, coarse: Sequence[str | Path] = (), fine: Sequence[str | Path] = (), **options: Any) -> None:
        super().__init__(coarse, fine, **options)
