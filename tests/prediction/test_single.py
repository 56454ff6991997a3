"""Models of one stage: `single` instead of `coarse` and `fine`."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.prediction.load_models import load_cascade
from medseg.prediction.options import PredictConfig
from medseg.weights.files import shipped_weights


def configured(*arguments: str) -> PredictConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("predict", ["input=i", "output=o", *arguments])
        return to_config(composed, PredictConfig)


def test_it_is_the_model_of_all_scans_or_of_a_range_of_spacings() -> None:
    (everywhere,) = configured("single=s").ranges.values()
    assert (everywhere.coarse, everywhere.fine, everywhere.single) == (None, None, ["s"])
    ranges = "{thin: {range_mm: [0,2]}, thick: {range_mm: [2,9], single: [t, u]}}"
    thin, thick = configured("single=s", f"by_spacing={ranges}").ranges.values()
    assert (thin.single, thick.single) == (["s"], ["t", "u"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("single=s", "coarse=c"),
        ("single=s", "fine=f"),
        ("single=s", "by_spacing={thin: {range_mm: [0,2], coarse: c}}"),
        ("single=s", "weights=w"),
    ],
)
def test_it_excludes_the_stages_of_a_cascade(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="leave one of them out"):
        configured(*arguments)


def test_the_coarse_stage_of_a_cascade_is_no_model_of_its_own() -> None:
    with pytest.raises(UserError, match=r"^single=.*coarse stage of a cascade; give it as coarse="):
        load_cascade(None, None, [shipped_weights("lungs", "coarse")], accelerator="cpu")


def test_a_missing_file_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^single="):
        load_cascade(None, None, [tmp_path / "missing.ckpt"], accelerator="cpu")
