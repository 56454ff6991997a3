"""MONAI bundle of a trained stage: configuration, metadata and scripts beside the network in TorchScript."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medseg.cascade.stage import TrainedStage
from medseg.errors import require
from medseg.geometry.grid_rule import PLAIN
from medseg.io.atomic import replace_bytes, replace_text
from medseg.io.text import read_text
from medseg.preprocess.resample import CUBIC

METADATA = "configs/metadata.json"
COMMAND = (
    "python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json --dataset_dir <scans> "
    "--output_dir <results>"
)


def check_bundle(stage: TrainedStage, folder: Path) -> None:
    """Refuse a folder with other files, and a stage whose grid the scripts of a bundle cannot make.

    Raises:
        UserError: With the cure.
    """
    is_free = not folder.exists() or not any(folder.iterdir()) or (folder / METADATA).is_file()
    require(is_free, f"output={folder}: the folder holds other files; give a new folder")
    require(
        stage.rule == PLAIN and stage.resampling != CUBIC,
        "a MONAI bundle cannot state this strategy of spacing (fixed_size, fixed_resolution, multi_scale, or cubic resampling); give "
        "output=model.onnx or model.xml, and follow its metadata",
    )


def write_bundle(folder: Path, described: dict[str, Any], network: bytes) -> None:
    """Write the files of a bundle.

    Args:
        folder: Its folder.
        described: From `describe_stage`.
        network: Content of `models/model.ts`.

    Raises:
        UserError: If a file cannot be written.
    """
    replace_bytes(folder / "models" / "model.ts", network)
    replace_text(folder / "scripts" / "__init__.py", '"""Scripts of the bundle."""\n')
    replace_text(folder / "scripts" / "stage.py", read_text(Path(__file__).with_name("bundle_stage.py")))
    replace_text(folder / "docs" / "README.md", _readme(described))
    replace_text(folder / "configs" / "inference.json", json.dumps(_inference(described), indent=1))
    replace_text(folder / METADATA, json.dumps(_metadata(described), indent=1, ensure_ascii=False))


def _inference(described: dict[str, Any]) -> dict[str, Any]:
    """Make the configuration of `python -m monai.bundle run`."""
    num_channels = len(described["channels"])
    first, tail = "_0000.nii.gz", len("_0000.nii.gz")
    scans = (
        "$sorted(glob.glob(os.path.join(@dataset_dir, '*.nii*')))"
        if num_channels == 1
        else f"$[[p[:-{tail}] + f'_{{n:04d}}.nii.gz' for n in range({num_channels})] "
        f"for p in sorted(glob.glob(os.path.join(@dataset_dir, '*{first}')))]"
    )
    by_region = {
        name: [described["label_values"][label] for label in labels[1:]] for name, labels in described["classes"].items()
    }
    return {
        "imports": ["$import glob", "$import os", "$import sys"],
        "initialize": ["$sys.path.insert(0, os.path.abspath(@bundle_root))"],  # for the scripts
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/scans'",
        "output_dir": "$@bundle_root + '/results'",
        "region": next(iter(by_region)),
        "label_values": by_region,
        "flipped_x": described["flipped_x"],
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "datalist": scans,
        "network_def": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device)",
        "network": "$@network_def.to(@device).eval()",
        "preprocessing": {"_target_": "Compose", "transforms": _preprocessing(described)},
        "dataset": {"_target_": "Dataset", "data": "$[{'image': one} for one in @datalist]", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "shuffle": False, "num_workers": 0},
        "inferer": {
            "_target_": "scripts.stage.TileInferer",
            "tile_size": described["tile_size"],
            "overlap": described["overlap"],
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {
                    "_target_": "scripts.stage.Restored",
                    "keys": "pred",
                    "image_key": "image",
                    "values": "$@label_values[@region]",
                    "is_flipped": "$@region in @flipped_x",
                },
                {
                    "_target_": "SaveImaged",
                    "keys": "pred",
                    "output_dir": "@output_dir",
                    "output_postfix": "",
                    "output_dtype": "$np.uint8",
                    "resample": False,
                    "separate_folder": False,
                },
            ],
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "amp": False,
        },
        "run": ["$@evaluator.run()"],
    }


def _preprocessing(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the transforms from the file of a scan to the network's input."""
    return [
        {"_target_": "LoadImaged", "keys": "image", "image_only": True},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "SPL"},
        {
            "_target_": "scripts.stage.Prepared",
            "keys": "image",
            "spacing_mm": None if described["spacing_mm"] == "native" else described["spacing_mm"],
            "is_antialiased": described["resampling"] != "linear",
            "channels": described["channels"],
            "body_margin_mm": described["crop"]["margin_mm"] if "all" in described["classes"] else None,
            "multiple_of": described["input"]["multiple_of"],
            "tile_size": described["tile_size"],
            "least_size": described["least_size"],
            "is_flipped": "$@region in @flipped_x",
        },
    ]


def _metadata(described: dict[str, Any]) -> dict[str, Any]:
    """Make `metadata.json`, whose key `medseg` is the description that other formats carry too."""
    names = next(iter(described["classes"].values()))
    shape = [
        size if isinstance(size, int) else f"{step}*n"
        for size, step in zip(described["input"]["shape"][2:], described["input"]["multiple_of"], strict=True)
    ]
    common = {"type": "image", "spatial_shape": shape, "dtype": "float32", "is_patch_data": described["tile_size"] is not None}
    channels = described["channels"]
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by medseg {described['medseg']}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {"nibabel": "5.2", "pytorch-ignite": "0.5", "fire": "0.7"},
        "name": f"{described['task']}, {described['stage']} stage",
        "task": f"segmentation of {', '.join(names[1:])}",
        "description": "One stage of medseg. Research software, not a medical device.",
        "authors": "medseg contributors",
        "copyright": "see the model card of the weights",
        "network_data_format": {
            "inputs": {
                "image": {
                    **common,
                    "format": "hounsfield" if channels[0]["modality"] == "ct" else "magnitude",
                    "modality": channels[0]["modality"].upper(),
                    "num_channels": len(channels),
                    "value_range": [-1, 1] if all(one["window_hu"] for one in channels) else [],
                    "channel_def": {str(number): one["modality"] for number, one in enumerate(channels)},
                }
            },
            "outputs": {
                "pred": {
                    **common,
                    "format": "segmentation",
                    "num_channels": described["output"]["shape"][1],
                    "value_range": [],
                    "channel_def": {str(number): name for number, name in enumerate(names)},
                }
            },
        },
        "medseg": described,
    }


def _readme(described: dict[str, Any]) -> str:
    regions = [name for name in described["classes"] if name != "all"]
    scans = "A scan is one NIfTI file, or one per channel: `<case>_0000.nii.gz`, `<case>_0001.nii.gz`, …"
    crops = (
        f"\nThis stage sees the crop of one region: its box with a margin of {described['crop']['margin_mm']:g} mm. `--region` names it, one of "
        f"{', '.join(regions)}.\n"
        if regions
        else ""
    )
    return (
        f"# {described['task']}, {described['stage']} stage\n\nRun in the folder of the bundle (elsewhere add `--bundle_root <folder>`), with `pip install 'monai[nibabel,ignite,fire]'`:\n\n"
        f"    {COMMAND}\n\n{scans} Each scan gives a label map with the same name.\n{crops}\n"
        "`configs/metadata.json` has the spacing, the intensities, the crop and the padding that the network needs, under "
        "`medseg`.\n\nResearch software, not a medical device.\n"
    )
