"""Ordered list of the transforms of a training sample.

The entries are effects of `medseg.data.augment` and dictionary transforms such as MONAI's. Every
transform draws from the generator of the sample, so that sample n depends on the seed and on n
alone: not on the number of loader workers, their start method or an interruption.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medseg.data.augment import Affine, Effect, Spacing, Warp, WindowShift
from medseg.data.sampler import sample_rng

# Packages of MONAI whose transforms move voxels, so that the labels must move with the image.
SPATIAL_MODULES = ("monai.transforms.spatial.", "monai.transforms.croppad.")
# Classes of MONAI whose package does not tell whether they move voxels: the first one degrades the
# image in place, the second one bends the image and all that it shows.
MOVES_VOXELS = {"RandSimulateLowResolutiond": False, "RandSmoothDeformd": True}
IMAGE = "image"
LABEL = "label"
# A transform is tested on a probe, a sample of four labelled blocks, with NUM_PROBES random
# generators: enough that a flip with probability 1/2 hardly fails to occur. `PROBE_VALUES` are the
# labels of the blocks. Interpolation between two labels, or a label and the background, rarely
# gives one of these values.
NUM_PROBES = 24
PROBE_SHAPE = (20, 24, 28)
PROBE_VALUES = (50, 100, 150, 200)


class Transforms:
    """Transforms of a training sample in their order.

    `WindowShift` and `Affine` are applied while the scan is read, before all others, regardless of
    their position in the list.

    Args:
        transforms: `WindowShift`, `Affine`, objects of `Effect`, and functions from a dictionary
            with `image` (C, D, H, W) and `label` (1, D, H, W) to such a dictionary. A function with
            a method `set_random_state`, as MONAI's have, is seeded for each sample.

    Raises:
        ValueError: If there are several objects of `Affine`.
    """

    def __init__(self, transforms: Iterable[Any]) -> None:
        self.transforms = tuple(transforms)
        self.affines = [item for item in self.transforms if isinstance(item, Affine)]
        if len(self.affines) > 1:
            raise ValueError(
                f"the list has {len(self.affines)} transforms Affine, but a sample is resampled "
                "only once; keep one of them"
            )

    def draw_window(
        self, rng: np.random.Generator, window_hu: tuple[float, float]
    ) -> tuple[float, float]:
        """Draw the HU window of a sample, `window_hu` shifted by each `WindowShift`."""
        for transform in self.transforms:
            if isinstance(transform, WindowShift):
                window_hu = transform.draw(rng, window_hu)
        return window_hu

    def draw_warp(self, rng: np.random.Generator, spacing_mm: Spacing) -> Warp | None:
        """Draw the affine resampling of a sample; None where it is not resampled."""
        return self.affines[0].draw(rng, spacing_mm) if self.affines else None

    def alter(
        self,
        image: Tensor,
        labels: Tensor,
        rng: np.random.Generator,
        spacing_mm: Spacing,
        num_scanned: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply all transforms that follow the reading, see `Effect`.

        Args:
            image: See `Effect`.
            labels: See `Effect`.
            rng: See `Effect`.
            spacing_mm: See `Effect`.
            num_scanned: Number of channels of the scan, which come first. Only transforms that move
                voxels or cut the field of view are applied to the channels after them, such as the
                coarse channel. None: all channels are of the scan.
        """
        for transform in self.transforms:
            # These were applied while the sample was read.
            if isinstance(transform, (WindowShift, Affine)):
                continue
            if num_scanned is None or _is_spatial(transform):
                image, labels = _apply(transform, image, labels, rng, spacing_mm)
                continue
            scanned, labels = _apply(transform, image[:num_scanned], labels, rng, spacing_mm)
            if num_scanned < len(image):
                image = torch.cat([scanned, image[num_scanned:]])
            else:
                image = scanned
        return image, labels


def _is_spatial(transform: Any) -> bool:
    """Whether a transform moves voxels, or cuts the field of view."""
    if isinstance(transform, Effect):
        return transform.is_spatial
    return _is_spatial_class(type(transform))


def _is_spatial_class(target: type) -> bool:
    """Whether a class is one of MONAI's that move voxels."""
    if target.__module__.startswith("monai.") and target.__name__ in MOVES_VOXELS:
        return MOVES_VOXELS[target.__name__]
    # The dot at the end keeps a package from matching another package whose name begins like it.
    return f"{target.__module__}.".startswith(SPATIAL_MODULES)


def _moves_all_channels(transform: Any) -> bool:
    """Whether a transform that moves voxels also moves the channels after those of the scan.

    `Affine` is no `Effect`: it is applied to all channels while the sample is read.
    """
    return isinstance(transform, Affine) or _is_spatial(transform)


def _apply(
    transform: Any,
    image: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> tuple[Tensor, Tensor]:
    """Apply an effect or a dictionary transform; arguments and result as in `Effect`."""
    if isinstance(transform, Effect):
        return transform(image, labels, rng, spacing_mm)
    return _apply_to_dictionary(transform, image, labels, rng)


def _apply_to_dictionary(
    transform: Any, image: Tensor, labels: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Apply a function of dictionaries, such as one of MONAI's.

    The transform keeps its random state between samples, so it is seeded for each sample.
    """
    if hasattr(transform, "set_random_state"):
        transform.set_random_state(seed=int(rng.integers(2**32)))
    changed = transform({IMAGE: image, LABEL: labels[None]})
    # MONAI returns `MetaTensor`, a subclass of `Tensor` with metadata.
    image = torch.as_tensor(changed[IMAGE]).as_subclass(Tensor)
    labels = torch.as_tensor(changed[LABEL]).as_subclass(Tensor)
    return image.float().contiguous(), labels[0].to(torch.uint8).contiguous()


def default_arguments(
    target: type, parameters: Iterable[str], arguments: Iterable[str]
) -> dict[str, Any]:
    """Choose `keys` and `mode` of a dictionary transform where the user does not.

    Image and labels move together, labels by the nearest voxel.

    Args:
        target: Class of the transform.
        parameters: Names of the arguments that it takes.
        arguments: Names of the arguments that the user gives.

    Returns:
        Arguments to add to those of the user.

    Raises:
        ValueError: If a transform that moves voxels is given `keys` but no `mode`, which would
            interpolate the labels.
    """
    if "keys" not in parameters:
        return {}
    is_spatial = _is_spatial_class(target)
    added: dict[str, Any] = {}
    if "keys" not in arguments:
        added["keys"] = [IMAGE, LABEL] if is_spatial else [IMAGE]
    if is_spatial and "mode" in parameters and "mode" not in arguments:
        # A list of modes must match the list of keys, which the user has given here.
        if "keys" in arguments:
            raise ValueError(
                "mode is missing beside keys; give one for each key, such as keys=[image,label] "
                "mode=[bilinear,nearest]"
            )
        added["mode"] = ["bilinear", "nearest"]
    return added


def check_transform(
    transform: Any,
    *,
    has_sides: bool,
    is_coarse: bool,
    num_channels: int = 1,
    has_coarse_channel: bool = False,
) -> None:
    """Test a transform on probes, which are samples of four labelled blocks.

    Args:
        transform: Transform of a list of `Transforms`.
        has_sides: Whether the task distinguishes left and right, so that no transform may mirror.
        is_coarse: Whether the network sees whole scans, with both sides. Then a mirrored z or y
            axis is refused, too: it makes a mirror image of the patient.
        num_channels: Channels of the image.
        has_coarse_channel: Whether the network sees the probabilities of a coarse stage, which must
            move with the voxels.

    Raises:
        ValueError: If the transform fails, changes the shape, interpolates labels, moves the image
            without the labels, or mirrors the sides.
    """
    for part in _parts_of(transform):
        _check_keys(part)
    # A copy that is applied to every sample. MONAI calls the attribute `prob`, our effects call it
    # `probability`; our effects are frozen dataclasses, hence `object.__setattr__`.
    eager_transform = copy.deepcopy(transform)
    for part in _parts_of(eager_transform):
        for name in ("prob", "probability"):
            if hasattr(part, name):
                object.__setattr__(part, name, 1.0)
    transforms = Transforms([eager_transform])
    labels = _probe_labels()
    # Each label has a value of its own within [-1, 1].
    image = (labels.float() / 250.0 - 0.9).expand(num_channels, *PROBE_SHAPE)
    for n in range(NUM_PROBES):
        changed_image, target = _apply_to_probe(transforms, image, labels, sample_rng(0, n))
        _check_shape("image", image, changed_image)
        _check_shape("labels", labels, target)
        if not set(target.unique().tolist()) <= {0, *PROBE_VALUES}:
            raise ValueError(
                "it interpolates between labels; leave keys and mode out, or give mode=nearest for "
                "the labels, such as mode=[bilinear,nearest]"
            )
        moves_labels = not torch.equal(target, labels)
        if has_coarse_channel and moves_labels and not _moves_all_channels(transform):
            raise ValueError(
                "it moves voxels, and stage.coarse_channel would stay where it was; name a "
                "transform of monai.transforms.spatial or croppad, or state is_spatial=True in the "
                "class of an effect"
            )
        if has_sides and _is_mirrored(target, is_coarse=is_coarse):
            raise ValueError(
                "it mirrors left and right, which the task distinguishes; leave that axis out, or "
                "give augment.allow_mirroring=true"
            )


def _parts_of(transform: Any) -> Iterator[Any]:
    """Yield a transform, and the transforms that it applies or chooses from, as MONAI's `OneOf`."""
    yield transform
    parts = getattr(transform, "transforms", ())
    if isinstance(parts, (list, tuple)):
        for part in parts:
            yield from _parts_of(part)


def _check_keys(transform: Any) -> None:
    """Refuse a transform that moves voxels of the image or the labels alone.

    Raises:
        ValueError: With the keys that are expected.
    """
    if not _is_spatial_class(type(transform)):
        return
    keys = getattr(transform, "keys", None)
    if keys is not None and set(keys) != {IMAGE, LABEL}:
        raise ValueError(
            f"it moves voxels, so keys=[{IMAGE},{LABEL}] are expected, or the labels no longer "
            f"fit; got keys={list(keys)}"
        )


def _check_shape(name: str, before: Tensor, after: Tensor) -> None:
    """Refuse a transform that changes the shape of the image or the labels, as `name` says.

    Raises:
        ValueError: With both shapes.
    """
    if after.shape != before.shape:
        raise ValueError(
            f"it changes the shape of the {name}, here from {tuple(before.shape)} to "
            f"{tuple(after.shape)}"
        )


def _probe_labels() -> Tensor:
    """Make the labels of a probe: a block and a neighbour of it along x, y and z; uint8."""
    labels = torch.zeros(PROBE_SHAPE, dtype=torch.uint8)
    # First voxel of each block, in the order of the values.
    corners = ((3, 4, 5), (3, 4, 17), (3, 14, 5), (11, 4, 5))
    for value, (z, y, x) in zip(PROBE_VALUES, corners, strict=True):
        labels[z : z + 6, y : y + 7, x : x + 8] = value
    return labels


def _apply_to_probe(
    transforms: Transforms, image: Tensor, labels: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Apply transforms to copies of the image and the labels of a probe.

    Raises:
        ValueError: If they fail.
    """
    # Transforms may change their arguments in place.
    image = image.clone()
    labels = labels.clone()
    spacing_mm = (1.0, 1.0, 1.0)
    try:
        warp = transforms.draw_warp(rng, spacing_mm)
        if warp is not None:
            image, labels = warp.apply(image, labels, PROBE_SHAPE)
        return transforms.alter(image, labels, rng, spacing_mm)
    except Exception as error:
        raise ValueError(
            f"it cannot be applied to a sample ({type(error).__name__}: {error})"
        ) from error


def _is_mirrored(target: Tensor, *, is_coarse: bool) -> bool:
    """Whether the four blocks of a probe have changed their handedness.

    In a crop of one region, a mirror image counts only if its x axis is reversed.

    Args:
        target: Labels of the probe after a transform.
        is_coarse: See `check_transform`.
    """
    centres = []
    for value in PROBE_VALUES:
        voxels = (target == value).nonzero()
        # Without all four blocks in the field of view, the handedness is unknown.
        if len(voxels) == 0:
            return False
        centres.append(voxels.double().mean(0))
    origin, x_end, y_end, z_end = centres
    # Directions of the probe's axes z, y and x after the transform, one per row, with components
    # (z, y, x). The determinant was positive before; it is negative in a mirror image.
    axes = torch.stack([z_end - origin, y_end - origin, x_end - origin])
    is_mirror_image = bool(torch.linalg.det(axes) < 0)
    is_x_reversed = float(axes[2, 2]) < 0
    return is_mirror_image and (is_coarse or is_x_reversed)
