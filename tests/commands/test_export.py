"""`medseg export`: what it prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
import pytest

from medseg.cascade.stage import TrainedStage
from medseg.commands.export import export
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import ExportConfig
from medseg.errors import UserError
from medseg.inference.export import Exported
from medseg.runs.signature import plain
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig
from medseg.weights.files import read_weights, write_weights
from medseg.weights.model_folder import StageWeights, write_model_folder


def run(*overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return export(to_config(hydra.compose("export", list(overrides)), ExportConfig))


def write(
    path: Path,
    target: str | None = None,
    overrides: Sequence[str] = ("model.width=4",),
    stage: str = "fine",
) -> Path:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("train", [f"stage={stage}", *overrides, "run_dir=x"]), TrainConfig
        )
    metadata = make_metadata(config, plain(config))
    if target is not None:
        metadata["model"]["_target_"] = target
    write_weights(path, metadata, make_network(config).state_dict())
    return path


NETWORKS = {
    "dynunet": [
        "model=dynunet",
        "model.kernel_size=[3,3,3]",
        "model.strides=[1,2,2]",
        "model.upsample_kernel_size=[2,2]",
        "model.filters=[4,8,8]",
        "model.deep_supr_num=1",
    ],
    "unetr": [
        "model=unetr",
        "model.img_size=[32,32,32]",
        "model.feature_size=4",
        "model.hidden_size=24",
        "model.mlp_dim=24",
        "model.num_heads=2",
        "stage.patch_size=[32,32,32]",
        "inference.tile_size=[32,32,32]",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "output"),
    [
        pytest.param("dynunet", "model.xml", marks=pytest.mark.thorough),
        ("unetr", "model.onnx"),
        pytest.param("dynunet", "model.onnx", marks=pytest.mark.thorough),
        pytest.param("unetr", "model.xml", marks=pytest.mark.thorough),
    ],
)
def test_networks_of_monai_are_exported_with_their_input_sizes(
    name: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "w.safetensors", None, NETWORKS[name])
    assert run(f"checkpoint='{path}'", f"output='{tmp_path / output}'") == 0
    size = {
        "dynunet": "any size in multiples of 4×4×4 voxels (z, y, x)",
        "unetr": "32×32×32 voxels (z, y, x) only",
    }[name]
    assert f"input of {size}; logits within" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["hostile_package.Net", "os.system"])
def test_a_hostile_class_of_a_checkpoint_is_never_imported(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_package.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    checkpoint = write(tmp_path / "w.safetensors", target)
    with pytest.raises(UserError, match=rf"checkpoint=.*: {target} is not on the white list"):
        run(f"checkpoint='{checkpoint}'", f"output='{tmp_path / 'model.onnx'}'")
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "model.onnx").exists()


def test_each_network_of_a_model_folder_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write(tmp_path / "w.safetensors", stage="single")
    metadata, weights = read_weights(checkpoint, None, "checkpoint")
    folder = tmp_path / "model"
    write_model_folder(folder, [StageWeights(metadata, weights, fold) for fold in ("0", "1")])
    with pytest.raises(UserError, match=r"expected a file that ends in \.onnx"):
        run(f"checkpoint='{folder}'", "output=.")
    exported = []

    def export_stage(stage: TrainedStage, output: Path) -> Exported:
        exported.append((Path(*stage.checkpoints).name, output))
        return Exported({}, None, 0.0, "ONNX")

    monkeypatch.setattr("medseg.commands.export.export_stage", export_stage)
    assert run(f"checkpoint='{folder}'", f"output='{tmp_path / 'out' / 'm.onnx'}'") == 0
    stems = ["lungs_single_fold_0", "lungs_single_fold_1"]
    assert exported == [
        (f"{stem}.safetensors", tmp_path / "out" / f"m_{stem}.onnx") for stem in stems
    ]
    assert capsys.readouterr().out.count("input of any size") == 2


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint=.*none\.ckpt: there is no such checkpoint"):
        run(f"checkpoint='{tmp_path / 'none.ckpt'}'", f"output='{tmp_path / 'model.onnx'}'")
