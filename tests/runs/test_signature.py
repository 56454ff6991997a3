"""A signature changes with whatever can change a result, and with nothing else."""

from __future__ import annotations

import hydra
import pytest
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.runs.signature import flat, neutral_keys, plain, signature
from medseg.training.options import TrainConfig


def composed(*overrides: str) -> dict[str, object]:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return plain(to_config(hydra.compose("train", ["run_dir=x", *overrides]), TrainConfig))


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "run_dir=elsewhere",
        "logger=none",
        "data.num_workers=7",
        "data.cache=elsewhere",
        "trainer.threads=3",
    ],
)
def test_places_and_means_leave_it(override: str) -> None:
    assert signature(composed(override)) == signature(composed())


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "steps=7",
        "optimizer.lr=0.5",
        "memory.precision=bf16",
        "stage.batch_size=2",
        "task.window_hu=[-900,100]",
    ],
)
def test_what_counts_changes_it(override: str) -> None:
    assert signature(composed(override)) != signature(composed())


def test_ranks_and_accumulation_count_by_the_batch_that_they_leave() -> None:
    batch = "stage.batch_size=4"
    one_rank = signature(composed(batch, "memory.accumulate=2"))
    assert signature(composed(batch, "trainer=ddp")) == one_rank
    assert signature(composed(batch)) != one_rank
    assert signature(composed(batch, "memory.accumulate=4")) != one_rank
    two_machines = ["trainer=ddp", "trainer.devices=1", "trainer.num_nodes=2"]
    assert signature(composed(batch, *two_machines)) == one_rank


def test_norms_that_look_at_all_ranks_tell_ranks_from_accumulation() -> None:
    """They see the samples of all ranks, but not those of other micro-batches."""
    batch = ["stage.batch_size=4", "model.norm=batch", "trainer=ddp", "trainer.sync_batchnorm=true"]
    two_ranks = signature(composed(*batch))
    in_two_parts = signature(
        composed(*batch, "trainer.devices=1", "trainer.num_nodes=1", "memory.accumulate=2")
    )
    assert in_two_parts != two_ranks


def test_it_survives_the_file_of_the_run_folder() -> None:
    config = composed("optimizer.lr=1e-5")
    assert signature(
        OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config))))
    ) == signature(config)


def test_a_filter_of_the_resampling_makes_another_run() -> None:
    assert signature(composed("spacing.resampling=linear")) != signature(composed())


def test_norms_that_look_at_all_ranks_make_the_number_of_ranks_count() -> None:
    batch = ["stage.batch_size=4", "model.norm=batch", "trainer=ddp"]
    two_ranks, accumulated = (
        [*batch, "memory.accumulate=1"],
        [*batch, "trainer.devices=1", "memory.accumulate=2"],
    )
    assert signature(composed(*two_ranks)) == signature(composed(*accumulated))
    synchronised = "trainer.sync_batchnorm=true"
    assert signature(composed(*two_ranks, synchronised)) != signature(
        composed(*accumulated, synchronised)
    )


def test_every_neutral_key_exists() -> None:
    keys = [f"{key}." for key in flat(composed())]
    assert {"data.cache", "logger", "memory.accumulate", "trainer.devices"} <= neutral_keys(
        TrainConfig
    )
    assert not [
        key
        for key in neutral_keys(TrainConfig)
        if not any(known.startswith(f"{key}.") for known in keys)
    ]


def test_a_run_of_one_stage_has_the_signature_of_its_folder() -> None:
    """Its `config.yaml` has no keys of a cascade."""
    config = composed("stage=single", "task=heart")
    recorded = {**config, "stage": dict(config["stage"])}  # type: ignore[call-overload]
    for key in ("coarse", "coarse_channel", "coarse_folds"):
        del recorded["stage"][key]
    assert signature(recorded) == signature(config)
