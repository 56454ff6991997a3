"""`prepare` tells what is wrong with a case and goes on with the others."""

from __future__ import annotations

from pathlib import Path

import hydra
import numpy as np
import pytest

from medseg.commands.prepare import prepare
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PrepareConfig
from medseg.data import cache
from medseg.data.case_table import Case
from medseg.io.read import read_labels
from medseg.io.write import write_labels
from medseg.training.assemble import make_data_module
from medseg.training.options import TrainConfig


def run(table: Path, cache_dir: Path, *overrides: str) -> int:
    common = [
        f"data.cases='{table}'",
        f"data.cache='{cache_dir}'",
        "spacing@spacings.fine=isotropic_4mm",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "prepare", [*common, "spacing@spacings.coarse=isotropic_4mm", *overrides]
        )
    return prepare(to_config(composed, PrepareConfig))


def cached(cache_dir: Path) -> list[str]:
    return sorted(
        sidecar.parent.name.rpartition("-")[0] for sidecar in cache_dir.rglob("case.json")
    )


def table_of(tiny_table: Path, folder: Path, *rows: str) -> Path:
    """A table of its own in the folder, over the scans of the tiny cases."""
    for file in tiny_table.parent.glob("*.nii.gz"):
        (folder / file.name).symlink_to(file)
    table = folder / "table.csv"
    table.write_text("\n".join(["case,image,labels", *rows]) + "\n")
    return table


@pytest.mark.parametrize("damage", ["missing", "truncated", "no memory"])
def test_a_bad_case_does_not_stop_the_rest(
    damage: str,
    tiny_table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ["a,c0.nii.gz,l0.nii.gz", "bad,bad.nii.gz,l1.nii.gz", "z,c2.nii.gz,l2.nii.gz"]
    table = table_of(tiny_table, tmp_path, *rows)
    said = "bad.nii.gz"
    if damage == "truncated":
        (tmp_path / "bad.nii.gz").write_bytes((tmp_path / "c1.nii.gz").read_bytes()[:500])
    elif damage == "no memory":
        (tmp_path / "bad.nii.gz").symlink_to(tmp_path / "c1.nii.gz")
        said = "MemoryError('512 GiB')"
        build = cache._build

        def fail(folder: Path, source: object, case: Case, *arguments: object) -> object:
            if case.name == "bad":
                raise MemoryError("512 GiB")
            return build(folder, source, case, *arguments)

        monkeypatch.setattr(cache, "_build", fail)
    assert run(table, tmp_path / "cache") == 1
    assert cached(tmp_path / "cache") == ["a", "z"]
    told = capsys.readouterr().err.splitlines()
    # A message that begins with the file of the case does not name the case before it.
    is_named = [line.startswith("medseg: bad: ") or "bad.nii.gz: " in line for line in told]
    assert sum(named and said in line for named, line in zip(is_named, told, strict=True)) == 1
    assert told[-1] == "medseg: 1 of 3 cases cannot be used: bad"


def test_another_label_convention(tiny_table: Path, tmp_path: Path) -> None:
    table = table_of(tiny_table, tmp_path, "a,c0.nii.gz,other.nii.gz", "b,c0.nii.gz,l0.nii.gz")
    labels = read_labels(tmp_path / "l0.nii.gz")
    other = np.array([0, 10, 11], dtype=np.uint8)[labels.array]
    other[7:] += (other[7:] == 11).astype(np.uint8)  # two lobes of the right lung
    other[0, 0, 0] = 5
    write_labels(tmp_path / "other.nii.gz", other, labels.grid)
    convention = [
        "data.label_values={left_lung: 10, right_lung: [11, 12]}",
        "+data.label_values.trachea=5",
    ]
    assert run(table, tmp_path / "cache", *convention) == 1, "b has another convention"
    assert cached(tmp_path / "cache") == ["a"]
    (mapped,) = (tmp_path / "cache").rglob("labels.npy")
    assert run(table, tmp_path / "plain") == 1
    (plain,) = (tmp_path / "plain").rglob("labels.npy")
    assert np.array_equal(np.load(mapped), np.load(plain))


def test_swapped_sides_are_refused(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(tiny_table, tmp_path, "a,c0.nii.gz,l0.nii.gz", "b,c1.nii.gz,l1.nii.gz")
    assert run(table, tmp_path / "cache", "data.label_values={left_lung: 2, right_lung: 1}") == 1
    assert cached(tmp_path / "cache") == []
    assert capsys.readouterr().err.count("refused (swapped_sides): ") == 2


@pytest.mark.parametrize(
    "spacing",
    [
        ["spacing=fixed_size"],
        [
            "spacing=multi_scale",
            "spacing.target_spacing_mm=[1.0,1.0,1.0]",
            "spacing.resampling=linear",
        ],
    ],
)
def test_training_finds_what_was_prepared_for_its_strategy(
    spacing: list[str], tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        one.replace("spacing=", "spacing@spacings.fine=").replace("spacing.", "spacings.fine.")
        for one in spacing
    ]
    assert run(tiny_table, tmp_path, *given) == 0
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [
            f"data.cases='{tiny_table}'",
            f"data.cache='{tmp_path}'",
            "stage=fine",
            "run_dir=x",
            *spacing,
        ]
        config = to_config(hydra.compose("train", arguments), TrainConfig)
    monkeypatch.setattr(
        "medseg.training.data_module.prepare_case", lambda *_, **__: pytest.fail("built anew")
    )
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    assert data.train_cases


def test_a_test_case_without_labels_is_no_mistake(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(tiny_table, tmp_path)
    table.write_text(
        "case,image,labels,split\na,c0.nii.gz,l0.nii.gz,train\nunlabelled,c1.nii.gz,,test\n"
    )
    assert run(table, tmp_path / "cache") == 0
    assert cached(tmp_path / "cache") == ["a"]
    assert (
        "medseg: 1 test case without labels: only predict uses them, so they are not prepared"
        in capsys.readouterr().err
    )
    table.write_text(
        "case,image,labels,split\na,c0.nii.gz,l0.nii.gz,train\nunlabelled,c1.nii.gz,,train\n"
    )
    assert run(table, tmp_path / "cache") == 1
