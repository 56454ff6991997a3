"""Baseline networks: the default 3D networks of nnU-Net and MONAI.

medseg does not depend on their packages: `install_baselines` installs them into a separate folder.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from torch import nn

from medseg.errors import UserError
from medseg.io.atomic import replace_text

# Installed without dependencies: the networks need torch and numpy only, and all networks must run
# on the same torch. `lungmask` is no baseline here, but `benchmarks/` uses this folder too.
PACKAGES = ("dynamic-network-architectures==0.4.4", "monai==1.6.1", "lungmask==0.2.22")


class Baseline(NamedTuple):
    """Baseline network.

    Attributes:
        title: Name in tables.
        trained_in: Precision in which nnU-Net or MONAI trains it, a value of `memory.precision`.
    """

    title: str
    trained_in: str


BASELINES = {
    # `nnUNetTrainer.train_step` of nnU-Net 2.8.1 uses CUDA's autocast, whose default is fp16.
    "nnunet": Baseline("nnU-Net's default network", "fp16"),
    # As in MONAI's tutorial, see `_make_monai`.
    "monai": Baseline("MONAI's UNet", "fp32"),
}


def install_baselines(folder: Path) -> Path:
    """Install the packages of the baselines, unless the folder already has these versions.

    Args:
        folder: Prefix of the installation, like a virtual environment.

    Returns:
        Folder of the installed packages, to be put first in `sys.path` or `PYTHONPATH`.

    Raises:
        UserError: If the packages cannot be installed.
    """
    python_folder = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages_folder = folder / "lib" / python_folder / "site-packages"
    # File that lists the installed packages. The keys `peers` and `peers_env` call baselines peers.
    marker = folder / "medseg-peers"
    installed_packages = []
    if marker.is_file():
        installed_packages = marker.read_text(encoding="utf-8").split()
    if packages_folder.is_dir() and installed_packages == list(PACKAGES):
        return packages_folder
    print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
    pip_command = [
        sys.executable,
        # `-P` keeps Python from importing modules of the working folder.
        "-Pm",
        "pip",
        "install",
        # A notice of a newer pip would be the last line of stderr, which is read as the error.
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--upgrade",
        "--target",
        str(packages_folder),
        *PACKAGES,
    ]
    result = subprocess.run(pip_command, capture_output=True, encoding="utf-8", check=False)
    if result.returncode != 0:
        error_lines = result.stderr.strip().splitlines() or ["pip failed"]
        reason = error_lines[-1]
        raise UserError(
            f"peers=true: {' and '.join(PACKAGES)} cannot be installed ({reason}); choose "
            "peers=false"
        )
    # Written last, so that an interrupted installation is repeated.
    replace_text(marker, "\n".join(PACKAGES))
    return packages_folder


def make_baseline(name: str, num_classes: int, in_channels: int = 1) -> nn.Module:
    """Build a baseline network.

    Args:
        name: Key of `BASELINES`.
        num_classes: Number of classes, the background included.
        in_channels: Channels of its input.

    Raises:
        ValueError: If there is no baseline of this name.
    """
    if name == "nnunet":
        return _make_nnunet(num_classes, in_channels)
    if name == "monai":
        return _make_monai(num_classes, in_channels)
    raise ValueError(f"expected one of {', '.join(BASELINES)}, got {name!r}")


def _make_nnunet(num_classes: int, in_channels: int) -> nn.Module:
    """Build nnU-Net's default network."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    # The choice of nnU-Net's planner for a patch of 96 to 128 voxels per side, without deep
    # supervision.
    network: nn.Module = PlainConvUNet(
        input_channels=in_channels,
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
    return network


def _make_monai(num_classes: int, in_channels: int) -> nn.Module:
    """Build MONAI's UNet."""
    from monai.networks.nets import UNet

    # Channels and strides of MONAI's tutorial of spleen segmentation in 3D.
    network: nn.Module = UNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=num_classes,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
        norm="batch",
    )
    return network
