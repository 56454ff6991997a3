"""Toy model folders of nnU-Net and the labels of its own predictor, for comparison with medseg.

Runs in an environment of its own that has nnU-Net and not medseg:

    python benchmarks/nnunet_reference.py make models/
    python benchmarks/nnunet_reference.py predict models/plain5 scan.nii.gz labels.npz
    python benchmarks/nnunet_reference.py record tests/nnunet/recorded
    python benchmarks/nnunet_reference.py measure    # for benchmarks/nnunet_table.py

The folders hold networks that nnU-Net builds from their plans, with random weights. The predictor
runs on the CPU, reads the scan by the reader of the plans and mirrors as the checkpoint allows.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

# nnU-Net asks for these folders when it is imported, and uses them in training alone.
FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
TRAINER = "nnUNetTrainer"
PLANS = "nnUNetPlans"
# Statistics of the foreground in HU, by which `CTNormalization` clips and scales.
CT = {"mean": -150.0, "std": 320.0, "percentile_00_5": -990.0, "percentile_99_5": 420.0}
# Module of nnU-Net's network classes.
UNET = "dynamic_network_architectures.architectures.unet"
# Arguments of resampling functions. `force_separate_z` None: where the spacing is anisotropic,
# nnU-Net resamples within planes first, then across them with `order_z`.
CUBIC = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
LINEAR = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
SEPARATE = {"is_seg": False, "force_separate_z": None}
# nnU-Net's names of its resampling functions.
SPLINE, TORCH, NONE = (
    "resample_data_or_seg_to_shape",
    "resample_torch_fornnunet",
    "no_resampling_hack",
)
# Small toy whose labels are recorded for all orders and directions of a scan's axes in its file.
STORED_MODEL = "torch"
# Arguments of each resampling function for images, reference labels and logits.
RESAMPLING: dict[str, tuple[dict[str, Any], ...]] = {
    SPLINE: (CUBIC, LINEAR | {"is_seg": True}, LINEAR),
    TORCH: (SEPARATE, SEPARATE, SEPARATE),
    NONE: ({}, {}, {}),
}


def labels_of(num_classes: int) -> dict[str, int]:
    """Name the classes of a toy, the background among them, as in `dataset.json`."""
    return {"background": 0} | {f"organ_{value}": value for value in range(1, num_classes)}


def described_network(base: int, *, residual: bool = False, axes: int = 3) -> dict[str, Any]:
    """Plan of a network of three levels, as nnU-Net 2.4 and newer write it.

    Args:
        base: Features of the first level; each further level has twice as many.
        residual: Whether the encoder has residual blocks.
        axes: 3, or 2 for a network of planes.

    Returns:
        The entry `architecture` of a configuration.
    """
    name = "ResidualEncoderUNet" if residual else "PlainConvUNet"
    blocks = "n_blocks_per_stage" if residual else "n_conv_per_stage"
    features = [base * 2**level for level in range(3)]
    return {
        "network_class_name": f"{UNET}.{name}",
        "arch_kwargs": {
            "n_stages": 3,
            "features_per_stage": features,
            "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
            "kernel_sizes": [[3] * axes] * 3,
            "strides": [[1] * axes, [2] * axes, [2] * axes],
            blocks: [1, 1, 1],
            "n_conv_per_stage_decoder": [1, 1],
            "conv_bias": True,
            "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def older_network() -> dict[str, Any]:
    """Plan of a small network with anisotropic strides, as nnU-Net before 2.4 wrote it.

    Its keys lie in the configuration itself.
    """
    return {
        "UNet_class_name": "PlainConvUNet",
        "UNet_base_num_features": 8,
        "unet_max_num_features": 320,
        "n_conv_per_stage_encoder": [2, 2, 2],
        "n_conv_per_stage_decoder": [2, 2],
        "num_pool_per_axis": [1, 2, 2],
        "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    }


def toy(
    labels: dict[str, Any],
    spacing_mm: list[float],
    patch_size: list[int],
    *,
    network: dict[str, Any] | None = None,
    transpose: tuple[int, int, int] = (0, 1, 2),
    schemes: tuple[str, ...] = ("CTNormalization",),
    masked: bool = False,
    resampling: str = SPLINE,
    mirror_axes: tuple[int, ...] | None = (0, 1, 2),
    folds: tuple[int, ...] = (0,),
    reader: str = "SimpleITKIO",
    regions_class_order: list[int] | None = None,
    trainer: str = TRAINER,
    previous: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a toy: plans, data set, and what its checkpoints hold.

    Args:
        labels: Name to value, or to a list of values for a region, as in `dataset.json`.
        spacing_mm: Spacing of the configuration, in the order of axes that `transpose` gives.
        patch_size: Voxels in the same order; two numbers make a 2D configuration.
        network: Part of the configuration that describes the network; None = the older form.
        transpose: `transpose_forward` of the plans.
        schemes: Normalisation of each channel.
        masked: Whether z-scores are computed inside the non-zero mask.
        resampling: Key of `RESAMPLING`.
        mirror_axes: Axes that the checkpoint allows to mirror; None = no mirroring.
        folds: Numbers of the folds.
        reader: `image_reader_writer` of the plans.
        regions_class_order: Label value of each region, as in `dataset.json`; None = no regions.
        trainer: Name of the trainer.
        previous: Toy of the first stage of a cascade, whose second stage this one is.

    Returns:
        `plans` and `dataset`, the contents of the two JSON files; `folds`, `mirror_axes`,
        `trainer` and `configuration`, the name of the configuration.
    """
    name = "2d" if len(patch_size) == 2 else "3d_fullres"
    image_arguments, label_arguments, logit_arguments = RESAMPLING[resampling]
    configuration = {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": patch_size,
        "median_image_size_in_voxels": [100.0, 100.0, 100.0],
        "spacing": spacing_mm,
        "normalization_schemes": list(schemes),
        "use_mask_for_norm": [masked] * len(schemes),
        "resampling_fn_data": resampling,
        "resampling_fn_seg": resampling,
        "resampling_fn_probabilities": resampling,
        "resampling_fn_data_kwargs": image_arguments,
        "resampling_fn_seg_kwargs": label_arguments,
        "resampling_fn_probabilities_kwargs": logit_arguments,
        "batch_dice": False,
        **(older_network() if network is None else {"architecture": network}),
    }
    # The plans of nnU-Net always have a 2D configuration, which may be the described one.
    configurations = {"2d": {}, name: configuration}
    if previous is not None:
        # The plans of a cascade hold both configurations, the first one under another name.
        name = "3d_cascade_fullres"
        configuration["previous_stage"] = "3d_lowres"
        first_configuration = previous["plans"]["configurations"]["3d_fullres"]
        configurations = {"3d_lowres": first_configuration, name: configuration}
    plans = {
        "dataset_name": "Dataset999_Toy",
        "plans_name": PLANS,
        "original_median_spacing_after_transp": spacing_mm,
        "original_median_shape_after_transp": [100, 100, 100],
        "image_reader_writer": reader,
        "transpose_forward": list(transpose),
        # The inverse of a permutation.
        "transpose_backward": [int(axis) for axis in np.argsort(transpose)],
        "configurations": configurations,
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            str(channel): CT for channel in range(len(schemes))
        },
    }
    dataset = {
        "channel_names": {str(channel): "CT" for channel in range(len(schemes))},
        "labels": labels,
        "numTraining": 1,
        "file_ending": ".nii.gz",
    }
    if regions_class_order is not None:
        dataset["regions_class_order"] = regions_class_order
    return {
        "plans": plans,
        "dataset": dataset,
        "folds": folds,
        "mirror_axes": mirror_axes,
        "trainer": trainer,
        "configuration": name,
    }


def toys() -> dict[str, dict[str, Any]]:
    """All toys by their names, each of which tests another property of nnU-Net's models."""
    regions = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "rim": 3}
    return {
        "plain2": toy(labels_of(2), [4.0, 3.0, 3.0], [16, 32, 32]),
        "plain5": toy(
            labels_of(5),
            [2.5, 1.5, 1.5],
            [24, 32, 40],
            network=described_network(8),
            folds=(0, 1, 2),
            mirror_axes=(0, 2),
        ),
        "plain25": toy(
            labels_of(25),
            [3.0, 3.0, 3.0],
            [24, 32, 32],
            network=described_network(8),
            mirror_axes=None,
        ),
        "plain61": toy(
            labels_of(61),
            [4.0, 4.0, 4.0],
            [32, 32, 32],
            network=described_network(4),
            mirror_axes=None,
        ),
        "residual5": toy(
            labels_of(5), [3.0, 2.0, 2.0], [24, 32, 32], network=described_network(8, residual=True)
        ),
        "regions": toy(
            regions,
            [3.0, 2.0, 2.0],
            [24, 32, 32],
            network=described_network(8),
            schemes=("ZScoreNormalization", "RescaleTo01Normalization"),
            regions_class_order=[1, 2, 3],
            mirror_axes=None,
        ),
        "masked": toy(
            labels_of(4),
            [3.0, 2.0, 2.0],
            [24, 32, 32],
            network=described_network(8),
            schemes=("ZScoreNormalization", "NoNormalization"),
            masked=True,
            mirror_axes=None,
        ),
        "anisotropic": toy(labels_of(5), [6.0, 1.5, 1.5], [8, 48, 48], mirror_axes=(1, 2)),
        "transposed": toy(
            labels_of(5) | {"ignore": 5},
            [2.0, 2.5, 2.0],
            [32, 24, 40],
            network=described_network(8),
            transpose=(2, 0, 1),
        ),
        "torch": toy(
            labels_of(5),
            [3.0, 2.0, 2.0],
            [24, 32, 32],
            network=described_network(8),
            resampling=TORCH,
            mirror_axes=None,
        ),
        "torch_apart": toy(
            labels_of(5), [6.0, 1.5, 1.5], [8, 48, 48], resampling=TORCH, mirror_axes=None
        ),
        "unresampled": toy(
            labels_of(5),
            [3.0, 2.0, 2.0],
            [24, 32, 32],
            network=described_network(8),
            resampling=NONE,
            mirror_axes=None,
        ),
        "reoriented": toy(
            labels_of(5),
            [3.0, 2.0, 2.0],
            [24, 32, 32],
            network=described_network(8),
            reader="NibabelIOWithReorient",
            mirror_axes=None,
        ),
        **toys_of_stages(8),
    }


def toys_of_stages(base: int) -> dict[str, dict[str, Any]]:
    """Three toys of planes and three cascades.

    Args:
        base: Features of the first level of their networks.
    """
    planes = described_network(base, axes=2)
    network = described_network(base)
    regions = {"background": 0, "whole": [1, 2], "core": 2}
    first = toy(labels_of(4), [4.0, 3.0, 3.0], [8, 16, 16], network=network)
    return {
        "2d": toy(
            labels_of(5), [1.5, 1.8], [24, 16], network=planes, folds=(0, 1), mirror_axes=(0, 1)
        ),
        "2d_transposed": toy(
            labels_of(4),
            [1.2, 3.0],
            [16, 12],
            network=described_network(base, residual=True, axes=2),
            transpose=(2, 0, 1),
            mirror_axes=(1,),
        ),
        "2d_regions": toy(
            regions,
            [2.0, 2.0],
            [16, 16],
            network=planes,
            schemes=("ZScoreNormalization", "NoNormalization"),
            masked=True,
            resampling=TORCH,
            regions_class_order=[1, 2],
            mirror_axes=None,
        ),
        "cascade": toy(labels_of(4), [2.0, 1.5, 1.5], [8, 16, 16], network=network, previous=first),
        "cascade_regions": toy(
            regions,
            [2.5, 2.0, 2.0],
            [8, 16, 16],
            network=network,
            schemes=("ZScoreNormalization", "NoNormalization"),
            masked=True,
            regions_class_order=[1, 2],
            mirror_axes=(1, 2),
            previous=toy(
                regions,
                [4.0, 3.0, 3.0],
                [8, 16, 16],
                network=network,
                schemes=("ZScoreNormalization", "NoNormalization"),
                masked=True,
                regions_class_order=[1, 2],
            ),
        ),
        "cascade_transposed": toy(
            labels_of(6),
            [1.4, 1.1, 5.0],
            [16, 12, 8],
            network=network,
            transpose=(1, 2, 0),
            mirror_axes=None,
            folds=(0, 1),
            previous=toy(labels_of(6), [3.0, 2.5, 6.0], [16, 12, 8], network=network),
        ),
    }


def make_models(output: Path) -> None:
    """Write all toys below a folder, each as `<toy>/<trainer>__<plans>__<configuration>`."""
    # The seed is the place in the list: a new toy in the middle changes the weights of later ones.
    for seed, (name, description) in enumerate(toys().items()):
        torch.manual_seed(seed)
        make_model(output / name, description)


def make_model(parent: Path, description: dict[str, Any]) -> Path:
    """Write one toy, a cascade with its first stage; returns its folder."""
    name = description["configuration"]
    # The random numbers of the first stage come first.
    if name == "3d_cascade_fullres":
        make_configuration(parent, description, "3d_lowres")
    return make_configuration(parent, description, name)


def make_configuration(parent: Path, description: dict[str, Any], name: str) -> Path:
    """Write one configuration of a toy; returns its folder."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    plans = description["plans"]
    dataset = description["dataset"]
    folder = parent / f"{description['trainer']}__{PLANS}__{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps(plans, indent=1))
    (folder / "dataset.json").write_text(json.dumps(dataset, indent=1))
    # A copy: the manager changes what it is given.
    manager = PlansManager(json.loads(json.dumps(plans)))
    configuration = manager.get_configuration(name)
    for fold in description["folds"]:
        network = get_network_from_plans(
            configuration.network_arch_class_name,
            configuration.network_arch_init_kwargs,
            configuration.network_arch_init_kwargs_req_import,
            determine_num_input_channels(manager, configuration, dataset),
            manager.get_label_manager(dataset).num_segmentation_heads,
            deep_supervision=True,
        )
        # Random scales and shifts, so that a norm that is left out or applied twice shows. The
        # parameters with one axis are those of norms, and the biases.
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        # What nnU-Net's trainer saves, with the types that a safe reader must accept.
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.99)
        checkpoint = {
            "network_weights": network.state_dict(),
            "optimizer_state": optimizer.state_dict(),
            "grad_scaler_state": None,
            # The logger of nnU-Net keeps NumPy numbers.
            "logging": {"mean_fg_dice": [np.float64(0.5)], "train_losses": [np.float32(0.1)]},
            "_best_ema": np.float64(0.5),
            "current_epoch": 1000,
            "init_args": {
                "plans": plans,
                "configuration": name,
                "fold": fold,
                "dataset_json": dataset,
                "device": torch.device("cpu"),
            },
            "trainer_name": description["trainer"],
            "inference_allowed_mirroring_axes": description["mirror_axes"],
        }
        fold_folder = folder / f"fold_{fold}"
        fold_folder.mkdir(exist_ok=True)
        torch.save(checkpoint, fold_folder / "checkpoint_final.pth")
    return folder


# Small toys whose random networks give a single label everywhere with the usual seed (their place
# in the list), and the seeds that they have instead.
SEEDS = {"2d_regions": 22, "2d_transposed": 20, "cascade_regions": 20}


def small_toys() -> dict[str, dict[str, Any]]:
    """Toys whose networks and scans are small enough to be kept with the tests."""
    tiny = described_network(2)
    regions = {"background": 0, "whole": [1, 2], "core": 2}
    return {
        "folds": toy(
            labels_of(4), [2.0, 1.5, 1.5], [8, 16, 16], network=tiny, folds=(0, 1), mirror_axes=(1,)
        ),
        "regions": toy(
            regions,
            [2.0, 2.0, 1.5],
            [8, 16, 12],
            network=tiny,
            schemes=("ZScoreNormalization", "NoNormalization"),
            masked=True,
            regions_class_order=[1, 2],
            mirror_axes=None,
        ),
        "anisotropic": toy(
            labels_of(6),
            [1.4, 1.1, 5.0],
            [16, 12, 8],
            network=described_network(2, residual=True),
            transpose=(1, 2, 0),
            mirror_axes=(0,),
        ),
        "torch": toy(
            labels_of(4),
            [2.0, 1.1, 1.4],
            [8, 16, 16],
            network=tiny,
            resampling=TORCH,
            mirror_axes=None,
        ),
        **toys_of_stages(2),
    }


def record(output: Path) -> None:
    """Write small models, synthetic scans and the labels of nnU-Net's predictor for the tests."""
    output.mkdir(parents=True, exist_ok=True)
    for number, (name, description) in enumerate(small_toys().items()):
        seed = SEEDS.get(name, number)
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        spacing_mm = (4.5, 1.0, 1.2)
        num_channels = len(description["dataset"]["channel_names"])
        # (C, D, H, W); whole numbers compress well.
        scan = rng.normal(-300, 300, (num_channels, 13, 27, 25)).astype(np.float32).round()
        # Zeros around the object and in a hole, so that the crop and the mask change the result.
        scan[:, :2] = 0
        scan[:, :, :, :3] = 0
        scan[:, 6, 10:13, 10:13] = 0
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder, "Dataset999_Toy"), description)
            labels = labels_of_nnunet(model, scan, {"spacing": list(spacing_mm)})
            with zipfile.ZipFile(output / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(model.parent.rglob("*.*")):
                    archive.write(file, file.relative_to(folder))
            if name == STORED_MODEL:
                record_orientations(model, output / "orientations.npz")
        np.savez_compressed(output / f"{name}.npz", scan=scan, spacing_mm=spacing_mm, labels=labels)
    record_ensembles(output)


# Small toys of one label set and one order of axes, whose probabilities are averaged.
ENSEMBLES = {
    "ensemble": ("folds", "torch", "cascade"),
    "ensemble_regions": ("2d_regions", "regions", "cascade_regions"),
}


def record_ensembles(recorded: Path) -> None:
    """Write the labels of nnU-Net's ensembles of recorded toys, on the scan of the first one.

    Args:
        recorded: Folder of `record`; receives `<ensemble>.npz` with `scan`, `spacing_mm` and
            `labels`.
    """
    for name, members in ENSEMBLES.items():
        with np.load(recorded / f"{members[0]}.npz") as first:
            scan, spacing_mm = first["scan"], first["spacing_mm"]
        with tempfile.TemporaryDirectory() as folder:
            models = []
            for member in members:
                with zipfile.ZipFile(recorded / f"{member}.zip") as archive:
                    archive.extractall(Path(folder, member))
                plans = sorted(Path(folder, member).rglob("plans.json"))
                # For a cascade this is the second stage, which sorts before the first one; the
                # predictor finds the first one beside it.
                models.append(plans[0].parent)
            labels = labels_of_ensemble(models, scan, {"spacing": spacing_mm.tolist()})
        np.savez_compressed(
            recorded / f"{name}.npz", scan=scan, spacing_mm=spacing_mm, labels=labels
        )


def labels_of_ensemble(
    folders: list[Path],
    image: np.ndarray,
    properties: dict[str, Any],
    watch: Callable[[torch.nn.Module], None] = lambda _: None,
) -> np.ndarray:
    """Average the probabilities that nnU-Net's predictor gives, by its own function for files.

    Args:
        folders: Model folders with one label set and one order of axes.
        image: Channels (C, D, H, W).
        properties: Properties of the scan, as nnU-Net's readers give them.
        watch: Called with each network before it runs.

    Returns:
        Labels (D, H, W), uint8.
    """
    from nnunetv2.ensembling.ensemble import average_probabilities
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    with tempfile.TemporaryDirectory() as temporary:
        files = []
        for number, folder in enumerate(folders):
            _, probabilities = results_of_nnunet(
                folder, image, properties, probabilities=True, watch=watch
            )
            files.append(str(Path(temporary, f"{number}.npz")))
            np.savez_compressed(files[-1], probabilities=probabilities)
        mean = average_probabilities(files)
    manager = PlansManager(str(folders[0] / "plans.json"))
    dataset = json.loads((folders[0] / "dataset.json").read_text())
    labels: np.ndarray = manager.get_label_manager(dataset).convert_probabilities_to_segmentation(
        mean
    )
    return labels.astype(np.uint8)


def storages() -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """All 48 ways to store a volume: the order of its axes, and which of them run backwards.

    Six orders with eight sets of directions each.
    """
    orders = itertools.permutations(range(3))
    flips = list(itertools.product((False, True), repeat=3))
    return list(itertools.product(orders, flips))


def record_orientations(model: Path, output: Path) -> None:
    """Write the labels of one scan in all storages, by readers that do and do not reorient.

    Args:
        model: A model folder.
        output: Receives `scan` (D, H, W) with axes to superior, posterior and left, `spacing_mm`,
            and the voxels of the labels of each storage, in stored order: `stored` and
            `reoriented`.
    """
    import nibabel
    from nnunetv2.imageio.nibabel_reader_writer import NibabelIOWithReorient
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    spacing_mm = np.array((3.0, 1.0, 1.2))
    scan = np.random.default_rng(7).normal(-300, 300, (11, 14, 12)).astype(np.int16)
    # Step along each axis of `scan` in mm of the world, (3, 3): rows are the axes; x, y, z of the
    # world run to right, anterior and superior.
    steps_mm = spacing_mm[:, None] * np.array([[0, 0, 1], [0, -1, 0], [-1, 0, 0]])
    labels: dict[str, list[np.ndarray]] = {"stored": [], "reoriented": []}
    readers = {"stored": SimpleITKIO(), "reoriented": NibabelIOWithReorient()}
    for order, flips in storages():
        signs = np.where(flips, -1, 1)
        # A slice with the step -1 reverses an axis.
        array = scan.transpose(order)[tuple(slice(None, None, int(sign)) for sign in signs)]
        # The stored axes of a NIfTI file are (x, y, z), the reverse of the array's; the columns of
        # its affine are their steps. The origin does not change labels.
        stored_steps_mm = signs[:, None] * steps_mm[list(order)]
        affine = np.eye(4)
        affine[:3, :3] = stored_steps_mm[::-1].T
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "scan.nii.gz")
            nibabel.save(nibabel.Nifti1Image(array.transpose(2, 1, 0), affine), path)
            for name, reader in readers.items():
                image, properties = reader.read_images([str(path)])
                written = Path(folder, f"{name}.nii.gz")
                reader.write_seg(
                    labels_of_nnunet(model, image, properties), str(written), properties
                )
                stored = nibabel.Nifti1Image.from_filename(written).get_fdata().astype(np.uint8)
                labels[name].append(stored.transpose(2, 1, 0).ravel())
    arrays: dict[str, Any] = {key: np.stack(labels[key]) for key in labels}
    np.savez_compressed(output, scan=scan, spacing_mm=spacing_mm, **arrays)


def labels_of_nnunet(folder: Path, image: np.ndarray, properties: dict[str, Any]) -> np.ndarray:
    """Run nnU-Net's own predictor on the CPU, on channels (C, D, H, W) as its reader gives them."""
    labels: np.ndarray = results_of_nnunet(folder, image, properties)
    return labels


def results_of_nnunet(
    folder: Path,
    image: np.ndarray,
    properties: dict[str, Any],
    *,
    probabilities: bool = False,
    watch: Callable[[torch.nn.Module], None] = lambda _: None,
) -> Any:
    """Run nnU-Net's own predictor on the CPU; a cascade with its first stage.

    Args:
        folder: Model folder; for a cascade, that of the second stage.
        image: Channels (C, D, H, W).
        properties: Properties of the scan, as nnU-Net's readers give them.
        probabilities: Whether probabilities are returned too.
        watch: Called with each network before it runs.

    Returns:
        Labels (D, H, W); with `probabilities` a pair: labels, and probabilities (K, D, H, W).
    """
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    previous = None
    if folder.name.endswith("__3d_cascade_fullres"):
        first = folder.with_name(f"{folder.name.rpartition('__')[0]}__3d_lowres")
        labels = results_of_nnunet(first, image, properties, watch=watch)
        # With an axis of channels and in the type of nnU-Net's readers, as from a file.
        previous = labels[None].astype(np.float32)
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(folder), None)
    watch(predictor.network)
    # The standard output is for the answers of `measure`.
    with contextlib.redirect_stdout(sys.stderr):
        return predictor.predict_single_npy_array(
            image,
            dict(properties),  # a copy: the predictor adds to it
            segmentation_previous_stage=previous,
            save_or_return_probabilities=probabilities,
        )


def predict(folder: Path, scans: list[Path], output: Path, num_threads: int) -> None:
    """Predict a scan with one thread or several, and write its labels.

    Args:
        folder: Model folder.
        scans: Files of the channels.
        output: NPZ file for the label array. nnU-Net's writer puts a label map beside it.
        num_threads: Threads of torch.
    """
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    torch.set_num_threads(num_threads)
    reader = PlansManager(str(folder / "plans.json")).image_reader_writer_class()
    image, properties = reader.read_images([str(scan) for scan in scans])
    labels = labels_of_nnunet(folder, image, properties)
    np.savez_compressed(output, labels=labels)
    reader.write_seg(labels, str(output).removesuffix(".npz") + ".nii.gz", properties)


class PassClock:
    """CPU seconds of a process inside the passes of its networks, which do not overlap.

    Attributes:
        seconds: Their sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        # Reading of the clock when the present pass began.
        self._start = 0.0

    def start(self, *_: Any) -> None:
        """Note that a pass begins; the arguments of torch's hook are not used."""
        self._start = time.process_time()

    def stop(self, *_: Any) -> None:
        """Add the seconds of the pass, which has ended. Arguments as in `start`."""
        self.seconds += time.process_time() - self._start

    def watch(self, network: torch.nn.Module) -> None:
        """Count the passes of a network."""
        network.register_forward_pre_hook(self.start)
        network.register_forward_hook(self.stop)


def measured_apart(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a function in a process of its own, which has all imports of this one.

    Args:
        run: The function; returns what can be pickled.
        arguments: Its arguments.

    Returns:
        What the function returns, with `cpu_s` and `peak_gb` of the process; `error` alone if the
        process ended without a result.
    """
    # A fork inherits the imports and the memory of this process, but not its CPU seconds.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_measured, args=(sender, run, arguments))
    process.start()
    # Only the child holds the sender now: its end closes the pipe, which raises EOFError here.
    sender.close()
    try:
        measured: dict[str, Any] = receiver.recv()
    except EOFError:
        measured = {}
    process.join()
    return measured or {"error": f"ended with code {process.exitcode}"}


def _send_measured(sender: Any, run: Callable[..., dict[str, Any]], arguments: Any) -> None:
    """Run the function of `measured_apart` in its process, and send the result."""
    start = time.process_time()
    measured = run(*arguments)
    measured["cpu_s"] = time.process_time() - start
    # The largest resident memory, as in `VmHWM:  1234 kB`; Linux means KiB.
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            measured["peak_gb"] = int(line.split()[1]) * 1024 / 1e9
    sender.send(measured)


def measure() -> None:
    """Predict on one thread; answer each line of the input with one line, both JSON.

    An input line has `models`, a model folder or those of an ensemble; `scans`, the files of the
    channels; and `labels`, the file to write. The answer is that of `measured_apart`.
    """
    # nnU-Net would resample with eight threads.
    os.environ["nnUNet_def_n_proc"] = "1"  # noqa: SIM112
    import nnunetv2.inference.predict_from_raw_data  # noqa: F401  # before there are processes

    torch.set_num_threads(1)
    for line in sys.stdin:
        measured = measured_apart(_predict_job, json.loads(line))
        print(json.dumps(measured), flush=True)


def _predict_job(job: dict[str, Any]) -> dict[str, Any]:
    """Predict for a line of `measure`; returns the CPU seconds inside the networks."""
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    clock = PassClock()
    folders = [Path(model) for model in job["models"]]
    # Another program reads the output of this process as JSON.
    with contextlib.redirect_stdout(sys.stderr):
        reader = PlansManager(str(folders[0] / "plans.json")).image_reader_writer_class()
        image, properties = reader.read_images(job["scans"])
        if len(folders) == 1:
            labels = results_of_nnunet(folders[0], image, properties, watch=clock.watch)
        else:
            labels = labels_of_ensemble(folders, image, properties, watch=clock.watch)
        reader.write_seg(labels, job["labels"], properties)
    return {"network_cpu_s": clock.seconds}


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("output", type=Path)
    small = commands.add_parser("record")
    small.add_argument("output", type=Path)
    run = commands.add_parser("predict")
    run.add_argument("folder", type=Path)
    run.add_argument("scans", type=Path, nargs="+")
    run.add_argument("output", type=Path)
    run.add_argument("--threads", type=int, default=1)
    commands.add_parser("measure")
    arguments = parser.parse_args()
    for variable in FOLDERS:
        os.environ.setdefault(variable, "/nonexistent")
    if arguments.command == "make":
        make_models(arguments.output)
    elif arguments.command == "record":
        record(arguments.output)
    elif arguments.command == "measure":
        measure()
    else:
        folder = arguments.folder
        # The folder of a toy holds its model folder.
        if not (folder / "plans.json").is_file():
            (folder,) = folder.iterdir()
        predict(folder, arguments.scans, arguments.output, arguments.threads)


if __name__ == "__main__":
    main()
