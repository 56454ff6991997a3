"""`medseg export`: what it prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
import pytest
import torch

from medseg.build.network import make_network
from medseg.build.run import make_metadata
from medseg.commands.export import export
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import ExportConfig, TrainConfig
from medseg.errors import UserError
from medseg.runs.signature import plain
from medseg.weights.files import write_weights


def run(*overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return export(to_config(hydra.compose("export", list(overrides)), ExportConfig))


def write(path: Path, target: str | None = None, overrides: Sequence[str] = ("model.width=4",)) -> Path:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", ["stage=fine", *overrides, "run_dir=x"]), TrainConfig)
    metadata = make_metadata(config, plain(config))
    if target is not None:
        metadata["model"]["_target_"] = target
    write_weights(path, metadata, make_network(config).state_dict())
    return path


def test_a_bundle_of_a_fine_checkpoint_is_written_again_over_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, bundle = write(tmp_path / "fine.safetensors"), tmp_path / "lungs bundle"
    for _ in range(2):
        assert run(f"checkpoint='{checkpoint}'", f"output='{bundle}'") == 0
    said = capsys.readouterr().out
    assert (
        f"{bundle}: MONAI bundle with TorchScript; input of any size in multiples of 16×16×16 voxels (z, y, x); logits within"
        in said
    )
    assert f"next: cd '{bundle}' && python -m monai.bundle run" in said
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert names == {
        "configs/inference.json",
        "configs/metadata.json",
        "docs/README.md",
        "models/model.ts",
        "scripts/__init__.py",
        "scripts/stage.py",
    }
    assert torch.jit.load(str(bundle / "models" / "model.ts"))(torch.zeros(1, 1, 32, 16, 48)).shape == (1, 2, 32, 16, 48)


NETWORKS = {
    "dynunet": ["model=dynunet", "model.kernel_size=[3,3,3]", "model.strides=[1,2,2]", "model.upsample_kernel_size=[2,2]", "model.filters=[4,8,8]", "model.deep_supr_num=1"],
    "unetr": ["model=unetr", "model.img_size=[32,32,32]", "model.feature_size=4", "model.hidden_size=24", "model.mlp_dim=24", "model.num_heads=2", "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"],
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "output", ["bundle", *(pytest.param(one, marks=pytest.mark.slow) for one in ("model.onnx", "model.xml"))]
)
def test_networks_of_monai_are_exported_with_their_input_sizes(
    name: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "w.safetensors", None, NETWORKS[name])
    assert run(f"checkpoint='{path}'", f"output='{tmp_path / output}'") == 0
    size = {"dynunet": "any size in multiples of 4×4×4 voxels (z, y, x)", "unetr": "32×32×32 voxels (z, y, x) only"}[name]
    assert f"input of {size}; logits within" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["hostile_package.Net", "os.system"])
def test_a_hostile_class_of_a_checkpoint_is_never_imported(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_package.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    checkpoint = write(tmp_path / "w.safetensors", target)
    with pytest.raises(UserError, match=rf"checkpoint=.*: {target} is not on the white list"):
        run(f"checkpoint='{checkpoint}'", f"output='{tmp_path / 'bundle'}'")
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "bundle").exists()


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint=.*none\.ckpt: there is no such checkpoint"):
        run(f"checkpoint='{tmp_path / 'none.ckpt'}'", f"output='{tmp_path / 'model.onnx'}'")
