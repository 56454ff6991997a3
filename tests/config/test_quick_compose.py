"""Quick composition of the tests: equal to Hydra's own, as are its refusals."""

from __future__ import annotations

import hydra
import pytest
import quick_compose
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException

from medseg.conf_folder import conf_dir
from medseg.config import schema  # noqa: F401  registers the schemas


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["stage=fine", "stage.patch_size=[96,100,96]", "steps=9"],
        ["steps=9", "stage=single", "task=abdomen", "+task.volume_ml.liver=[1, 2]"],
        ["experiment=demo_fine", "model=segresnet", "model.init_filters=8", "run_dir='a b'"],
        ["~logger", "++data.label_values.left_lung=7", "optimizer={lr: 1}"],
        ["hydra.job.num=3", "augment=none"],
    ],
)
def test_a_configuration_is_the_one_that_hydra_composes(overrides: list[str]) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        whole = quick_compose.compose_all("train", overrides)
        # Twice: what the first one adds does not stay.
        for _ in range(2):
            quick = quick_compose.compose("train", overrides)
            assert quick == whole
            assert quick._get_flag("struct") == whole._get_flag("struct")


def test_what_is_stored_anew_under_a_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {**store.repo, "schedule": {}})
    schedules = []
    for steps in (3, 4):
        store.store("of_a_test", {"total_steps": steps}, "schedule")
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            schedules.append(quick_compose.compose("train", ["schedule=of_a_test"]).schedule)
    assert schedules == [{"total_steps": 3}, {"total_steps": 4}]


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=fine", "stage.nmae=x"],
        ["stage=thin"],
        ["steps=1,2"],
        ["+steps=1"],
        ["~no_such_key"],
    ],
)
def test_what_hydra_refuses_is_refused_with_its_words(overrides: list[str]) -> None:
    said = []
    for compose in (quick_compose.compose_all, quick_compose.compose):
        with (
            hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
            pytest.raises(ConfigCompositionException) as caught,
        ):
            compose("train", overrides)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]
