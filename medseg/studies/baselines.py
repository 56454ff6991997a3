"""Baseline networks: the default 3D networks of nnU-Net and MONAI.

pip installs their packages into a folder of their own.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from torch import nn

from medseg.errors import UserError
from medseg.io.atomic import replace_text

# Installed without their dependencies: the networks need torch and numpy only, and every row must
# run on the same torch. Benchmarks of the prediction measure the network of lungmask, from the same
# folder; it is no baseline of trainings.
PACKAGES = ("dynamic-network-architectures==0.4.4", "monai==1.6.1", "lungmask==0.2.22")


class Baseline(NamedTuple):
    """Baseline network.

    Attributes:
        title: Its name in tables.
        trained_in: Precision in which its own program trains it.
    """

    title: str
    trained_in: str


BASELINES = {
    # `nnUNetTrainer.train_step` of nnU-Net 2.8.1: autocast of CUDA, which is fp16; fp32 on a CPU.
    "nnunet": Baseline("nnU-Net's default network", "fp16"),
    # As MONAI's own tutorial, see `_make_monai`.
    "monai": Baseline("MONAI's UNet", "fp32"),
}


def install_baselines(folder: Path) -> Path:
    """Install the packages of the baselines, unless the folder already has these versions.

    Returns:
        The folder of the packages, to be put first in `sys.path` or `PYTHONPATH`.

    Raises:
        UserError: If the packages cannot be installed.
    """
    python_folder = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / python_folder / "site-packages"
    # Named after the keys `peers` and `peers_env`, by which users ask for baselines.
    marker = folder / "medseg-peers"
    installed_packages = []
    if marker.is_file():
        installed_packages = marker.read_text(encoding="utf-8").split()
    if packages.is_dir() and installed_packages == list(PACKAGES):
        return packages
    print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        # Its notice would be the last line of an error.
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--upgrade",
        "--target",
        str(packages),
        *PACKAGES,
    ]
    result = subprocess.run(install, capture_output=True, encoding="utf-8", check=False)
    if result.returncode:
        error_lines = result.stderr.strip().splitlines() or ["pip failed"]
        reason = error_lines[-1]
        raise UserError(
            f"peers=true: {' and '.join(PACKAGES)} cannot be installed ({reason}); choose "
            "peers=false"
        )
    replace_text(marker, "\n".join(PACKAGES))
    return packages


def make_baseline(name: str, num_classes: int) -> nn.Module:
    """Build a baseline network for one input channel.

    Args:
        name: Key of `BASELINES`.
        num_classes: Classes with the background.

    Raises:
        ValueError: If there is no baseline of this name.
    """
    if name == "nnunet":
        return _make_nnunet(num_classes)
    if name == "monai":
        return _make_monai(num_classes)
    raise ValueError(f"expected one of {', '.join(BASELINES)}, got {name!r}")


def _make_nnunet(num_classes: int) -> nn.Module:
    """Build nnU-Net's default network."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    # What nnU-Net's planner chooses for a patch of 96 to 128 voxels per side, without deep
    # supervision.
    plain: nn.Module = PlainConvUNet(
        input_channels=1,
        n_stages=6,
        features_per_stage=(32, 64, 128, 256, 320, 320),
        conv_op=nn.Conv3d,
        kernel_sizes=3,
        strides=(1, 2, 2, 2, 2, 2),
        n_conv_per_stage=2,
        num_classes=num_classes,
        n_conv_per_stage_decoder=2,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
    )
    return plain


def _make_monai(num_classes: int) -> nn.Module:
    """Build MONAI's UNet."""
    from monai.networks.nets import UNet

    # Channels and strides of MONAI's 3D tutorial of the spleen.
    unet: nn.Module = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=num_classes,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
        norm="batch",
    )
    return unet
