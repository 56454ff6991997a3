"""Every file of `conf/` composes, builds and takes two steps."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.search import SearchConfig
from medseg.runs import folder as runs
from medseg.runs.train_run import train_run
from medseg.training.options import TrainConfig
from medseg.weights.files import shipped_weights

# Root files have commands of their own (tests/apps); `hydra` says where Hydra writes, `sweep` what
# is searched.
GROUPS = sorted(
    path for path in conf_dir().iterdir() if path.is_dir() and path.name not in ("hydra", "sweep")
)
FILES = [(group.name, path.stem) for group in GROUPS for path in sorted(group.glob("*.yaml"))]
FILES.remove(("task", "brain_tumour"))  # four channels: test_task_presets.py
# Its steps take as long as those of the other networks together, and tests/matrix takes one too.
LONGEST = ("model", "swin_unetr")
CASES = [
    *(file for file in FILES if file != LONGEST),
    pytest.param(*LONGEST, marks=pytest.mark.thorough),
]
# What a file needs beside itself on the tiny cases.
ALSO = {
    ("task", "heart"): ["+data.label_values={heart: 1, other: 2}"],
    ("data", "phantom_organs"): ["data.labels_column=labels"],
    ("inference", "tiles"): ["stage=fine", "inference.tile_size=[32,32,32]"],
    # tests/integration has two ranks.
    ("trainer", "ddp"): ["trainer.devices=1", "trainer.strategy=auto"],
    ("trainer", "gpu"): ["trainer.accelerator=cpu"],
    ("loss", "batch_dice_ce"): ["stage.batch_size=2"],
    ("loss", "sum"): ["loss.terms=[{_target_: torch.nn.CrossEntropyLoss, factor: 0.5}]"],
    ("memory", "lean"): ["stage=fine"],
    **{
        ("experiment", name): ["stage.patch_size=[32,48,48]"]
        for name in ("ct_fine", "finetune_fine", "lctsc_fine", "phantom_fine")
    },
    ("experiment", "lungs_fine_airway"): [
        "stage.patch_size=[32,48,48]",
        f"stage.coarse='{shipped_weights('lungs', 'coarse')}'",
    ],
    ("model", "dynunet"): ["model.filters=[4,8,8,8,8,8]"],
    ("model", "swin_unetr"): ["model.feature_size=12"],
    ("model", "unetr"): [
        "stage=fine",
        "stage.patch_size=[32,32,32]",
        "inference.tile_size=[32,32,32]",
        "model.img_size=[32,32,32]",
        "model.hidden_size=24",
        "model.mlp_dim=24",
        "model.num_heads=2",
    ],
}
EXPERIMENT = [
    "data.val_patients=[]", "data.test_patients=[]", "data.phantoms.num_extra=0", "model.width=4",
    "spacing.target_spacing_mm=[4.0,4.0,4.0]",
]  # fmt: skip


@pytest.mark.parametrize(("group", "name"), CASES, ids=lambda value: value)
@pytest.mark.slow
def test_takes_two_steps(
    group: str, name: str, tiny_table: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Files of these groups change or read the pictures.
    if group not in ("data", "logger", "spacing", "stage", "task"):
        request.getfixturevalue("without_pictures")
    overrides = [
        f"data.cases='{tiny_table}'", f"data.cache='{tiny_table.parent / 'cache'}'",
        "data.num_workers=0", "steps=2",
        "model.width=4", "spacing.target_spacing_mm=[4.0,4.0,4.0]", "trainer.accelerator=cpu",
        f"{group}={name}",
        *ALSO.get((group, name), []), *(EXPERIMENT if group == "experiment" else []),
    ]  # fmt: skip
    overrides += [] if group == "logger" else ["logger=none"]
    if name in ("mlflow", "wandb"):
        pytest.importorskip(name, reason="pip install 'medseg[loggers]'")
    # The file itself decides these keys.
    prefix = {"model": "model.width", "spacing": "spacing."}.get(group)
    if prefix is not None:
        overrides = [override for override in overrides if not override.startswith(prefix)]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", [*overrides, f"run_dir='{tmp_path / 'run'}'"])
    config = to_config(composed, TrainConfig)
    run_dir = runs.open_run(config)
    summary = train_run(config)
    assert summary["steps"] == 2
    assert 0.0 <= summary["val_dice_best"] <= 1.0
    assert (run_dir / "checkpoints" / "last.ckpt").is_file()
    assert (run_dir / "history.csv").read_text().count("\n") >= 3


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "sweep").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_space_holds_values_that_a_run_could_have(path: Path) -> None:
    """With the command that the file itself names."""
    pytest.importorskip("optuna", reason="the extra medseg[search] is not installed")
    from medseg.studies.search import check_space, composer

    command = next(line for line in path.read_text().splitlines() if line.startswith("# Run:"))
    arguments = [
        argument
        for argument in command.split("medseg search ")[1].split()
        if not argument.startswith("data.cases=")
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("search", [*arguments, "run_dir=none"]), SearchConfig)
        assert config.sweep.name == path.stem
        check_space(config.sweep, composer(arguments, config.sweep))
