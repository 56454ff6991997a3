"""Toy model folders of nnU-Net, with networks that are built from their plans."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.nnunet_reference import PLANS, TRAINER, toys
from medseg.nnunet.network import make_network
from medseg.nnunet.plan import read_plan

MODEL = f"{TRAINER}__{PLANS}__3d_fullres"
MakeFolder = Callable[..., Path]


@pytest.fixture
def toy() -> dict[str, Any]:
    """Plans, data set and checkpoints of a toy of two classes, to be changed by a test."""
    # Toys share their parts.
    return copy.deepcopy(toys()["plain2"])


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A function that writes a toy as a model folder with random weights and returns the folder."""

    def make(toy: dict[str, Any], parent: Path = tmp_path / "model", **changes: Any) -> Path:
        pytest.importorskip("dynamic_network_architectures")
        folder = parent / MODEL
        folder.mkdir(parents=True)
        (folder / "plans.json").write_text(json.dumps(toy["plans"]))
        (folder / "dataset.json").write_text(json.dumps(toy["dataset"]))
        plan = read_plan(toy["plans"], toy["dataset"], "3d_fullres")
        torch.manual_seed(0)
        for fold in toy["folds"]:
            checkpoint = {
                "network_weights": make_network(plan).state_dict(),
                "logging": {"mean_fg_dice": [np.float64(0.5)], "losses": [np.float32(0.1)]},
                "trainer_name": toy["trainer"],
                "init_args": {"configuration": "3d_fullres", "device": torch.device("cpu")},
                "inference_allowed_mirroring_axes": toy["mirror_axes"],
            }
            (folder / f"fold_{fold}").mkdir()
            torch.save({**checkpoint, **changes}, folder / f"fold_{fold}" / "checkpoint_final.pth")
        return folder

    return make
