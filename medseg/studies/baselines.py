"""Networks of others, as their users get them, to be measured beside ours; in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.errors import UserError

if TYPE_CHECKING:
    from torch import nn

# Installed without their dependencies: torch and numpy are those that our own rows run with, and nothing else is needed.
PACKAGES = ("dynamic-network-architectures==0.4.4", "monai==1.6.1", "lungmask==0.2.22")
PEERS = {"nnunet": "nnU-Net's default network", "monai": "MONAI's UNet"}


def make_environment(folder: Path) -> Path:
    """Make an environment that has the peers beside everything that this one has; nothing where it is there already.

    Returns:
        Its Python.

    Raises:
        UserError: If the packages cannot be installed.
    """
    python = folder / "bin" / "python"
    done = folder / "medseg-peers"
    if done.is_file() and done.read_text(encoding="utf-8").split() == list(PACKAGES):
        return python
    print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    places = [str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if path.endswith("-packages"))]
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "medseg.pth").write_text("\n".join(places) + "\n", encoding="utf-8")
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--ignore-installed", *PACKAGES]
    result = subprocess.run([sys.executable, *install], capture_output=True, encoding="utf-8", check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"peers=true: {' and '.join(PACKAGES)} cannot be installed ({reason}); choose peers=false")
    done.write_text("\n".join(PACKAGES), encoding="utf-8")
    return python


def make_peer(name: str, num_classes: int) -> nn.Module:
    """Make a network of others for one input channel.

    Args:
        name: Key of `PEERS`.
        num_classes: Classes with the background.
    """
    from torch import nn

    if name == "nnunet":
        from dynamic_network_architectures.architectures.unet import PlainConvUNet

        # What nnU-Net's planner gives a patch of 96 to 128 voxels per side, without deep supervision.
        plain: nn.Module = PlainConvUNet(
            input_channels=1, n_stages=6, features_per_stage=(32, 64, 128, 256, 320, 320), conv_op=nn.Conv3d, kernel_sizes=3,
            strides=(1, 2, 2, 2, 2, 2), n_conv_per_stage=2, num_classes=num_classes, n_conv_per_stage_decoder=2, conv_bias=True,
            norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
        )  # fmt: skip
        return plain
    from monai.networks.nets import UNet

    # The channels and strides of MONAI's own 3D tutorials (spleen).
    unet: nn.Module = UNet(
        spatial_dims=3, in_channels=1, out_channels=num_classes, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2),
        num_res_units=2, norm="batch",
    )  # fmt: skip
    return unet
