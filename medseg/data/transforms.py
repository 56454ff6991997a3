"""Ordered list of the transforms of a training sample.

They are effects of `medseg.data.augment` and dictionary transforms such as MONAI's.
Every transform draws from the generator of the sample, so that a sample depends on (seed, n) alone:
not on the number of loader workers, their start method or an interruption.
"""

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medseg.data.augment import Affine, Effect, Spacing, Warp, WindowShift
from medseg.data.sampler import sample_rng

# Packages of MONAI whose transforms move voxels, so that the labels must move with the image.
SPATIAL_MODULES = ("monai.transforms.spatial.", "monai.transforms.croppad.")
IMAGE = "image"
LABEL = "label"
# Samples that a transform is tried on, and the labels of four blocks in them: interpolated labels
# differ from all four.
NUM_PROBES = 24
PROBE_SHAPE = (20, 24, 28)
PROBE_VALUES = (50, 100, 150, 200)


class Transforms:
    """Transforms of a training sample in their order.

    `WindowShift` and `Affine` act while the scan is read, before all others, wherever they stand in
    the list.

    Args:
        transforms: `WindowShift`, `Affine`, objects of `Effect`, and functions from a dictionary
            with `image` (C, D, H, W) and `label` (1, D, H, W) to such a dictionary. One with a
            method `set_random_state`, as MONAI's have, is seeded for each sample.

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
        """Draw the HU window of a sample."""
        for transform in self.transforms:
            if isinstance(transform, WindowShift):
                window_hu = transform.draw(rng, window_hu)
        return window_hu

    def draw_warp(self, rng: np.random.Generator, spacing_mm: Spacing) -> Warp | None:
        """Draw the affine resampling of a sample; None without one."""
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
            num_scanned: Channels that a scanner made; those after them only follow transforms that
                move voxels or cut the field of view. None: all.
        """
        for transform in self.transforms:
            if isinstance(transform, (WindowShift, Affine)):
                continue
            if num_scanned is None or _is_spatial(transform):
                image, labels = _apply(transform, image, labels, rng, spacing_mm)
                continue
            changed, labels = _apply(transform, image[:num_scanned], labels, rng, spacing_mm)
            if num_scanned < len(image):
                image = torch.cat([changed, image[num_scanned:]])
            else:
                image = changed
        return image, labels


def _is_spatial(transform: Any) -> bool:
    """Whether a transform moves voxels, or cuts the field of view."""
    if isinstance(transform, Effect):
        return transform.is_spatial
    return f"{type(transform).__module__}.".startswith(SPATIAL_MODULES)


def _moves_all_channels(transform: Any) -> bool:
    """Whether a transform that moves voxels also moves the channels that no scanner made."""
    return isinstance(transform, Affine) or _is_spatial(transform)


def _apply(
    transform: Any,
    image: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> tuple[Tensor, Tensor]:
    if isinstance(transform, Effect):
        return transform(image, labels, rng, spacing_mm)
    return _apply_to_dictionary(transform, image, labels, rng)


def _apply_to_dictionary(
    transform: Any, image: Tensor, labels: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    if hasattr(transform, "set_random_state"):
        transform.set_random_state(seed=int(rng.integers(2**32)))
    changed = transform({IMAGE: image, LABEL: labels[None]})
    # MONAI returns tensors of a class of its own, with metadata.
    image, labels = (torch.as_tensor(changed[key]).as_subclass(Tensor) for key in (IMAGE, LABEL))
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

    Raises:
        ValueError: If a transform that moves voxels is given `keys` but no `mode`, which would
            interpolate the labels.
    """
    if "keys" not in parameters:
        return {}
    is_spatial = f"{target.__module__}.".startswith(SPATIAL_MODULES)
    added: dict[str, Any] = {}
    if "keys" not in arguments:
        added["keys"] = [IMAGE, LABEL] if is_spatial else [IMAGE]
    if is_spatial and "mode" in parameters and "mode" not in arguments:
        if not added:
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
    """Try a transform on samples of four blocks.

    Args:
        transform: Transform of a list of `Transforms`.
        has_sides: Whether the task distinguishes left and right, so that it must not mirror them.
        is_coarse: Whether the network sees both sides; then a mirrored z or y axis also exchanges
            left and right.
        num_channels: Channels of the image.
        has_coarse_channel: Whether the network sees the probabilities of a coarse stage, which must
            move with the voxels.

    Raises:
        ValueError: If it fails, changes the shape, interpolates labels, moves the image without the
            labels, or mirrors the sides.
    """
    _check_keys(transform)
    tried = copy.deepcopy(transform)
    for name in ("prob", "probability"):
        if hasattr(tried, name):
            object.__setattr__(tried, name, 1.0)  # our effects are frozen
    transforms = Transforms([tried])
    labels = _probe_labels()
    image = (labels.float() / 250.0 - 0.9).expand(num_channels, *PROBE_SHAPE)
    for n in range(NUM_PROBES):
        changed, target = _apply_to_probe(transforms, image, labels, sample_rng(0, n))
        if changed.shape != image.shape or target.shape != labels.shape:
            raise ValueError(
                f"it changes the shape of a sample, here from {PROBE_SHAPE} to "
                f"{tuple(target.shape)}"
            )
        if not set(target.unique().tolist()) <= {0, *PROBE_VALUES}:
            raise ValueError(
                "it interpolates between labels; give mode=nearest for the labels, such as "
                "mode=[bilinear,nearest]"
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


def _check_keys(transform: Any) -> None:
    """Refuse a transform that moves voxels of the image or the labels alone.

    Raises:
        ValueError: With the keys that are expected.
    """
    if not f"{type(transform).__module__}.".startswith(SPATIAL_MODULES):
        return
    keys = getattr(transform, "keys", None)
    if keys is not None and set(keys) != {IMAGE, LABEL}:
        raise ValueError(
            f"it moves voxels, so keys=[{IMAGE},{LABEL}] are expected, or the labels no longer "
            f"fit; got keys={list(keys)}"
        )


def _probe_labels() -> Tensor:
    """Make the labels of a probe: a block and its neighbour along each axis; uint8."""
    labels = torch.zeros(PROBE_SHAPE, dtype=torch.uint8)
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
    changed = image.clone()
    target = labels.clone()
    try:
        warp = transforms.draw_warp(rng, (1.0, 1.0, 1.0))
        if warp is not None:
            changed, target = warp.apply(changed, target, PROBE_SHAPE)
        return transforms.alter(changed, target, rng, (1.0, 1.0, 1.0))
    except Exception as error:
        raise ValueError(
            f"it cannot be applied to a sample ({type(error).__name__}: {error})"
        ) from error


def _is_mirrored(target: Tensor, *, is_coarse: bool) -> bool:
    """Whether the four blocks of a probe have changed their handedness.

    In a crop of one region only a reversed x axis counts.
    """
    if any(not (target == value).any() for value in PROBE_VALUES):
        return False  # a block has left the field of view
    origin, x_end, y_end, z_end = (
        (target == value).nonzero().double().mean(0) for value in PROBE_VALUES
    )
    axes = torch.stack([z_end - origin, y_end - origin, x_end - origin])
    return bool(torch.linalg.det(axes) < 0) and (is_coarse or float(axes[2, 2]) < 0)
