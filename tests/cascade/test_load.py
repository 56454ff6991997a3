"""Trained stages: what a checkpoint brings to prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from oracle import CoarseOracle
from oracle import stage as oracle_stage

from medseg.cascade import load as stages
from medseg.cascade.bound import DiceBound
from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stage, load_stages, with_label_details
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid_rule import PLAIN, GridRule
from medseg.inference.openvino import openvino_bytes
from medseg.inference.options import Backend, InferenceOptions
from medseg.models.stage_network import StageNetwork
from medseg.prediction.export_stage import describe_stage
from medseg.runs.signature import plain
from medseg.task import CleanUp
from medseg.task_options import make_task
from medseg.training.assemble import make_metadata
from medseg.training.network import load_initial_weights, make_network
from medseg.training.options import TrainConfig
from medseg.weights.checks import check_ranges
from medseg.weights.files import checksum, read_weights, shipped_weights, write_weights

CPU = torch.device("cpu")


def compose(*overrides: str, stage: str = "fine") -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", [f"stage={stage}", "model.width=4", *overrides, "run_dir=x"]),
            TrainConfig,
        )


def write(path: Path, config: TrainConfig, **changes: Any) -> StageNetwork:
    """Write the file of a new network, its metadata without the keys that are None; return it."""
    network = make_network(config)
    metadata = make_metadata(config, plain(config)) | changes
    write_weights(
        path,
        {key: value for key, value in metadata.items() if key not in changes or value},
        network.state_dict(),
    )
    return network


@pytest.mark.parametrize(("precision", "is_last"), [("bf16", True), ("fp32", False)])
def test_half_precision_is_run_channels_last(precision: str, is_last: bool, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    network = write(path, compose())
    stage = load_stage(path, "fine", CPU, precision)
    assert stage.precision == precision
    layouts = [
        weight.is_contiguous(memory_format=torch.channels_last_3d)
        for weight in stage.network.parameters()
        if weight.ndim == 5
    ]
    assert all(layouts) is is_last
    image = torch.randn(1, 1, 32, 32, 32)
    logits = stage.network(image)
    torch.testing.assert_close(logits, network(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("has_openvino", "room_bytes", "backend", "num_measured"),
    [
        (True, 101.0, Backend.openvino, 1),
        (True, 100.0, Backend.openvino, 1),
        (True, 99.0, Backend.torch, 0),
        (False, 101.0, Backend.torch, 0),
    ],
)
def test_backends_are_measured_where_openvino_is_installed_and_fits(
    has_openvino: bool,
    room_bytes: float,
    backend: Backend,
    num_measured: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(stages, "has_openvino", lambda: has_openvino)
    monkeypatch.setattr(stages, "openvino_bytes", lambda network: 100.0)
    monkeypatch.setattr(
        stages, "quickest_backend", lambda network: measured.append(network) or "openvino"
    )
    trained: Any = SimpleNamespace(network="network")
    assert stages._quickest_backend(trained, room_bytes) is backend
    assert measured == ["network"] * num_measured


def test_one_stage_segments_the_labels_of_a_task_with_regions(tmp_path: Path) -> None:
    config = compose(stage="single")
    assert config.task.regions
    write(tmp_path / "s.safetensors", config)
    stage = load_stage(tmp_path / "s.safetensors", "single", CPU)
    assert (stage.name, stage.task.regions) == ("single", ())
    assert Cascade(stage).fine is None


@pytest.mark.parametrize("norm", ["instance", "channel", "affine"])
def test_half_precision_weights_take_half_the_memory_and_give_the_same_logits(
    norm: str, tmp_path: Path
) -> None:
    path, image = tmp_path / "w.safetensors", torch.randn(1, 1, 64, 64, 64)
    write(path, compose(f"model.norm={norm}"))
    full, half = (
        load_stage(path, "fine", CPU, "bf16", (), InferenceOptions(half_weights=is_half))
        for is_half in (False, True)
    )
    sizes = [sum(weight.nbytes for weight in stage.network.parameters()) for stage in (full, half)]
    assert sizes[1] < 0.52 * sizes[0]
    with torch.inference_mode():
        assert torch.equal(full.serve(0, image), half.serve(0, image))
    with pytest.raises(
        UserError,
        match=r"inference\.half_weights=true: the fine stage runs in fp32; give precision=bf16",
    ):
        load_stage(path, "fine", CPU, "fp32", (), InferenceOptions(half_weights=True))


def test_the_backend_is_measured_only_where_the_processor_lacks_the_precision_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, used = tmp_path / "w.safetensors", []
    write(path, compose("memory.precision=bf16"))
    monkeypatch.setattr(stages, "has_openvino", lambda: True)
    monkeypatch.setattr(stages, "quickest_backend", lambda _: "openvino")
    required: list[bool] = []

    def use_openvino(_: object, precision: str, __: str, *, is_required: bool) -> None:
        used.append(precision)
        required.append(is_required)

    monkeypatch.setattr(stages, "use_openvino", use_openvino)
    monkeypatch.setattr(stages, "stage_precision", lambda _, asked, *__: asked or "bf16")
    load_stage(path, "fine", CPU)
    monkeypatch.setattr(stages, "stage_precision", lambda _, asked, *__: asked or "fp32")
    load_stage(path, "fine", CPU, "fp32")
    load_stage(path, "fine", CPU, options=InferenceOptions(backend=Backend.torch))
    assert used == []
    load_stage(path, "fine", CPU)
    load_stage(path, "fine", CPU, "bf16", options=InferenceOptions(backend=Backend.openvino))
    assert used == ["fp32", "bf16"]
    assert required == [False, True], "a network that cannot be converted stops who asked for it"
    need_bytes = openvino_bytes(
        load_stage(path, "fine", CPU, options=InferenceOptions(backend=Backend.torch)).network
    )
    load_stage(path, "fine", CPU, backend_room_bytes=need_bytes - 1)
    assert used == ["fp32", "bf16"], "no room: torch"
    load_stage(path, "fine", CPU, backend_room_bytes=need_bytes)
    load_stages([path, path], "fine", CPU, backend_room_bytes=1.5 * need_bytes)
    assert used == ["fp32", "bf16", "fp32", "fp32"], "of two networks one has room"
    with pytest.raises(
        UserError, match=r"inference\.half_weights=true works with inference\.backend=torch only"
    ):
        load_stage(
            path,
            "fine",
            CPU,
            "bf16",
            options=InferenceOptions(half_weights=True, backend=Backend.openvino),
        )


@pytest.mark.parametrize("bytes_per_voxel", [(3.0, 8.0, 5.0), (8.0, 3.0, 5.0)])
def test_an_average_needs_the_memory_of_its_largest_network_and_of_all_backends(
    bytes_per_voxel: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[float] = []
    backends = [4, 7, 2]

    def load(path: Path, *arguments: Any) -> Any:
        rooms.append(arguments[-1])
        number = int(path.name)
        return oracle_stage(
            CoarseOracle(),
            "coarse",
            bytes_per_voxel=bytes_per_voxel[number],
            backend_bytes=backends[number],
            checkpoints={path.name: f"sum {number}"},
        )

    monkeypatch.setattr(stages, "load_stage", load)
    paths = [Path(str(number)) for number in range(3)]
    loaded = load_stages(paths, "coarse", CPU, backend_room_bytes=20.0)
    assert rooms == [20.0, 16.0, 9.0]
    assert (loaded.bytes_per_voxel, loaded.backend_bytes) == (8.0, 13)
    assert len(loaded.networks) == 3
    assert loaded.checkpoints == {"0": "sum 0", "1": "sum 1", "2": "sum 2"}


def test_convolutions_and_linear_layers_alone_are_stored_in_half_precision() -> None:
    parts = {
        "convolution": torch.nn.Conv3d(2, 3, 1),
        "transposed": torch.nn.ConvTranspose3d(3, 2, 2),
        "linear": torch.nn.Linear(4, 5),
        "norm": torch.nn.BatchNorm3d(3),
    }
    trained = oracle_stage(torch.nn.ModuleDict(parts), "fine", precision="bf16")
    stages._store_half(trained)
    kinds = {name: {weight.dtype for weight in part.parameters()} for name, part in parts.items()}
    half, full = {torch.bfloat16}, {torch.float32}
    assert kinds == {"convolution": half, "transposed": half, "linear": half, "norm": full}


def test_older_weights_know_the_plausible_volumes_of_their_task() -> None:
    stage = load_stages([shipped_weights("lungs", "coarse")], "coarse", CPU)
    assert stage.task.volume_ml == make_task(compose().task).volume_ml
    assert set(stage.task.volume_ml) == set(stage.task.codes) == {"left_lung", "right_lung"}
    known = make_task(compose().task)
    own = replace(known, volume_ml={"left_lung": (1.0, 2.0)}, codes={}, colours={})
    assert with_label_details(own) == replace(known, volume_ml={"left_lung": (1.0, 2.0)})
    other = replace(stage.task, labels={"lung": 1}, regions=(), volume_ml={}, codes={})
    assert with_label_details(other) == other
    assert with_label_details(replace(other, name="../lungs")).volume_ml == {}


def test_initial_weights_may_predate_an_argument_of_the_network(tmp_path: Path) -> None:
    path, config = tmp_path / "w.safetensors", compose()
    arguments = make_metadata(config, {})["model"]
    old = write(
        path, config, model={name: value for name, value in arguments.items() if name != "refine"}
    )
    new = make_network(config)
    load_initial_weights(new, compose(f"init_from='{path}'"))
    assert all(
        torch.equal(weight, old.state_dict()[name]) for name, weight in new.state_dict().items()
    )
    other = compose("model.refine=4", f"init_from='{path}'")
    with pytest.raises(UserError, match="give the same model"):
        load_initial_weights(make_network(other), other)


def test_a_coarse_channel_starts_without_effect(tmp_path: Path) -> None:
    weights, coarse = tmp_path / "w.safetensors", tmp_path / "coarse.safetensors"
    old = write(weights, compose())
    write(coarse, compose(stage="coarse"))
    config = compose(
        "stage.coarse_channel=true", f"stage.coarse='{coarse}'", f"init_from='{weights}'"
    )
    new = make_network(config)
    load_initial_weights(new, config)
    image = torch.rand(1, 2, 32, 32, 32).double() * 2 - 1
    torch.testing.assert_close(new.double()(image), old.double()(image[:, :1]))
    # Its weights take part in the first step.
    new(image).square().sum().backward()
    first = next(iter(new.parameters()))
    assert first.grad is not None
    assert first.grad[:, -1].abs().max() > 0


@pytest.mark.parametrize("overrides", [(), ("model.stem=space_to_depth",)])
def test_a_class_that_initial_weights_lack_starts_rare(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    weights = tmp_path / "w.safetensors"
    old = write(weights, compose(*overrides, stage="coarse"))
    added = ("+task.labels.airway=3", "+data.label_values.airway=3")
    config = compose(*overrides, *added, f"init_from='{weights}'", stage="coarse")
    new = make_network(config)
    load_initial_weights(new, config)
    image = torch.rand(1, 1, 32, 32, 32).double() * 2 - 1
    before, after = old.double()(image), new.double()(image)
    torch.testing.assert_close(after[:, :3], before)
    torch.testing.assert_close(after[:, 3], before[:, 0] - 2.0)
    fewer = compose(*overrides, "task=heart", f"init_from='{weights}'", stage="coarse")
    with pytest.raises(UserError, match="do not fit the task heart"):
        load_initial_weights(make_network(fewer), fewer)


@pytest.mark.parametrize("stage", ["coarse", "fine"])
@pytest.mark.parametrize("overrides", [(), ("model.stem=space_to_depth",)])
@pytest.mark.parametrize(
    ("old_helpers", "new_helpers", "sources"),
    [
        # For each helper class of the new network its number among those of the file; None: none.
        ("airway: 3", "vessel: 3", [None]),
        ("airway: 3", "vessel: 3, airway: 4", [None, 0]),
        # A file sorts its labels by name, but the classes follow the values.
        ("vessel: 3, airway: 4", "airway: 3, vessel: 4", [1, 0]),
        ("airway: 3, vessel: 4", "vessel: 3", [1]),
    ],
)
def test_classes_of_initial_weights_are_matched_by_name(
    old_helpers: str,
    new_helpers: str,
    sources: list[int | None],
    overrides: tuple[str, ...],
    stage: str,
    tmp_path: Path,
) -> None:
    def labelled(helpers: str, *more: str) -> TrainConfig:
        labels = f"+task.labels={{{helpers}}}", f"+data.label_values={{{helpers}}}"
        return compose(*overrides, *labels, *more, stage=stage)

    path = tmp_path / "w.safetensors"
    old = write(path, labelled(old_helpers))
    config = labelled(new_helpers, f"init_from='{path}'")
    new = make_network(config)
    load_initial_weights(new, config)
    image = torch.rand(1, 1, 32, 32, 32).double() * 2 - 1
    before, after = old.double()(image), new.double()(image)
    # Background and organs: two lungs, or the lung of the crop.
    num_shared = 3 if stage == "coarse" else 2
    assert after.shape[1] == num_shared + len(sources)
    torch.testing.assert_close(after[:, :num_shared], before[:, :num_shared])
    for number, source in enumerate(sources):
        expected = before[:, 0] - 2.0 if source is None else before[:, num_shared + source]
        torch.testing.assert_close(after[:, num_shared + number], expected)


def test_classes_without_a_common_label_are_matched_by_number(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    old = write(path, compose(stage="coarse"))
    config = compose("task=kidneys", f"init_from='{path}'", stage="coarse")
    new = make_network(config)
    load_initial_weights(new, config)
    for name, weight in new.state_dict().items():
        assert torch.equal(weight, old.state_dict()[name])


def test_the_included_weights_fine_tune_as_the_pages_say() -> None:
    coarse, fine = (shipped_weights("lungs", stage) for stage in ("coarse", "fine"))
    lungs = to_network("experiment=lungs_coarse_4mm", f"init_from='{coarse}'")
    # Their helper class, the airway, is left out.
    assert lungs(torch.zeros(1, 1, 32, 32, 32)).shape[1] == 3
    with pytest.raises(UserError, match=r"give stage\.coarse_channel=true stage\.coarse="):
        to_network("experiment=finetune_fine", f"init_from='{fine}'")
    channel = ("stage.coarse_channel=true", f"stage.coarse='{coarse}'")
    lung = to_network("experiment=finetune_fine", f"init_from='{fine}'", *channel)
    assert lung(torch.zeros(1, 2, 32, 32, 32)).shape[1] == 2


def to_network(*overrides: str) -> StageNetwork:
    """Make the network of a configuration with its initial weights."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", [*overrides, "run_dir=x"]), TrainConfig)
    network = make_network(config)
    load_initial_weights(network, config)
    return network


def test_initial_weights_with_a_damaged_task_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, compose(), task={"name": "lungs"})
    config = compose(f"init_from='{path}'")
    with pytest.raises(UserError, match=r"its metadata are damaged .*take another copy"):
        load_initial_weights(make_network(config), config)


def test_a_checkpoint_brings_its_coarse_channel_and_older_ones_have_none(tmp_path: Path) -> None:
    coarse, path, older = (tmp_path / f"{name}.safetensors" for name in ("coarse", "w", "older"))
    write(coarse, compose(stage="coarse"))
    write(path, compose("stage.coarse_channel=true", f"stage.coarse='{coarse}'"))
    write(older, compose(), coarse_channel=None)
    stage = load_stage(path, "fine", CPU)
    assert (stage.has_coarse_channel, stage.num_channels) == (True, 2)
    described = describe_stage(stage, None)
    assert (described["coarse_channel"], described["input"]["shape"][1]) == (True, 2)
    assert not load_stage(older, "fine", CPU).has_coarse_channel
    with pytest.raises(UserError, match="cannot be averaged: has_coarse_channel is"):
        load_stages([path, older], "fine", CPU)


def test_several_checkpoints_are_averaged_if_they_ask_for_the_same_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, overrides in zip(
        paths, ([], ["model.width=8"], ["spacing=isotropic_2mm"]), strict=True
    ):
        write(path, compose(*overrides))
    one, wide = (load_stages([path], "fine", CPU) for path in paths[:2])
    both = load_stages(paths[:2], "fine", CPU)
    assert [len(stage.others) for stage in (one, both)] == [0, 1]
    # Widths may differ; the wider network decides what fits.
    assert (
        both.bytes_per_voxel == max(one.bytes_per_voxel, wide.bytes_per_voxel) > one.bytes_per_voxel
    )
    assert both.checkpoints == {str(path): checksum(path) for path in paths[:2]}
    with pytest.raises(
        UserError,
        match=r"cannot be averaged: spacing_mm is \(1\.0, 1\.0, 1\.0\) in the one and \(2\.0",
    ):
        load_stages([paths[0], paths[2]], "fine", CPU)
    # All networks stay loaded.
    loaded = {
        paths[0]: replace(one, backend_bytes=7),
        paths[1]: replace(wide, backend_bytes=9),
    }
    monkeypatch.setattr(stages, "load_stage", lambda path, *_: loaded[path])
    both = load_stages(paths[:2], "fine", CPU)
    assert both.backend_bytes == 7 + 9


@pytest.mark.parametrize(
    ("overrides", "spacing_mm", "rule", "divisor"),
    [
        (["spacing=isotropic_2mm"], (2.0, 2.0, 2.0), PLAIN, (16, 16, 16)),
        (["spacing=anisotropic"], (2.5, 1.0, 1.0), PLAIN, (8, 16, 16)),
        (
            ["spacing=dataset_median", "spacing.target_spacing_mm=[5.0,0.8,0.8]"],
            (5.0, 0.8, 0.8),
            PLAIN,
            (4, 16, 16),
        ),
        (["spacing=native"], None, PLAIN, (16, 16, 16)),
        (["spacing=multi_scale"], None, GridRule(range_mm=(1.0, 4.0)), (16, 16, 16)),
        (["spacing=fixed_resolution"], (2.0, 2.0, 2.0), GridRule(is_cube=True), (16, 16, 16)),
        (["spacing=fixed_size"], None, GridRule(size=(128, 128, 128)), (16, 16, 16)),
        (
            [
                "spacing=fixed_size",
                "spacing.size=[64,96,80]",
                "spacing.target_spacing_mm=[2.0,1.0,1.0]",
            ],
            (2.0, 1.0, 1.0),
            GridRule(size=(64, 96, 80)),
            (16, 16, 16),
        ),
    ],
)
def test_a_checkpoint_brings_its_grid_and_its_network(
    overrides: list[str],
    spacing_mm: tuple[float, float, float] | None,
    rule: GridRule,
    divisor: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.safetensors"
    network = write(path, compose(*overrides))
    trained = load_stage(path, "fine", CPU)
    assert trained.spacing_mm == spacing_mm
    assert trained.rule == rule
    assert trained.divisor == network.divisor == divisor


def test_a_checkpoint_brings_its_resampling_and_older_ones_use_the_defaults(tmp_path: Path) -> None:
    path, older = tmp_path / "w.safetensors", tmp_path / "older.safetensors"
    config = compose("spacing.resampling=linear")
    write(path, config)
    write(older, config, resampling=None, grid_rule=None)
    assert load_stage(path, "fine", CPU).resampling == "linear"
    stage = load_stage(older, "fine", CPU)
    assert (stage.resampling, stage.rule) == ("antialiased", PLAIN)
    with pytest.raises(
        UserError,
        match="cannot be averaged: resampling is linear in the one and antialiased in the other",
    ):
        load_stages([path, older], "fine", CPU)


def test_the_clean_up_of_a_file_belongs_to_its_stage(tmp_path: Path) -> None:
    rule = {"part": "left_lung", "min_ml": 2.5, "only_largest": False, "fill_holes": True}
    path, other = tmp_path / "w.safetensors", tmp_path / "other.safetensors"
    write(path, compose(), clean_up=[rule])
    write(other, compose())
    loaded = load_stage(path, "fine", CPU)
    assert loaded.clean_up == (CleanUp("left_lung", 2.5, fill_holes=True),)
    assert describe_stage(loaded, None)["clean_up"] == [rule]
    assert load_stage(other, "fine", CPU).clean_up == ()
    with pytest.raises(UserError, match="cannot be averaged: clean_up is"):
        load_stages([path, other], "fine", CPU)
    for change in ({"part": "liver"}, {"min_ml": -1.0}, {"min_ml": "2"}, {"unknown": 1}):
        write(path, compose(), clean_up=[{**rule, **change}])
        with pytest.raises(UserError, match="its metadata are damaged or of another version"):
            load_stage(path, "fine", CPU)


FOREIGN = {
    "segresnet": ["model=segresnet", "model.init_filters=8"],
    "dynunet": [
        "model=dynunet", "model.kernel_size=[3,3,3]", "model.strides=[1,2,2]",
        "model.upsample_kernel_size=[2,2]", "model.filters=[4,8,8]",
        "model.deep_supr_num=1",
    ],
    "unetr": [
        "model=unetr", "model.img_size=[32,32,32]", "model.feature_size=4", "model.hidden_size=24",
        "model.mlp_dim=24", "model.num_heads=2",
        "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
def test_a_checkpoint_of_another_network_brings_its_class_and_arguments(
    name: str, suffix: str, tmp_path: Path
) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("train", ["stage=fine", *FOREIGN[name], "run_dir=x"]), TrainConfig
        )
    path = tmp_path / f"w.{suffix}"
    if suffix == "safetensors":
        network = write(path, config)
    else:
        network = make_network(config)
        weights = {f"network.{key}": value for key, value in network.state_dict().items()}
        torch.save(
            {
                "state_dict": weights,
                "medseg": make_metadata(config, plain(config)),
                "global_step": 1,
            },
            path,
        )
    stage = load_stage(path, "fine", CPU, "fp32")
    image = torch.randn(1, 1, 32, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(stage.network(image), network.eval()(image))
    assert stage.bytes_per_voxel > 0
    load_initial_weights(make_network(config), replace(config, init_from=str(path)))


@pytest.mark.parametrize(
    "target", ["hostile_package.Net", "os.system", "torch.nn.modules.module._global"]
)
def test_a_hostile_class_of_a_checkpoint_is_never_imported(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_package.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path, config = tmp_path / "w.safetensors", compose()
    write(
        path,
        config,
        model={**make_metadata(config, {})["model"], "_target_": target},
        trusted_targets=["hostile_package."],
    )
    with pytest.raises(UserError, match=r"is not on the white list .* add trusted_targets="):
        load_stage(path, "fine", CPU)
    assert not (tmp_path / "imported").exists()


def test_half_precision_weights_run_on_a_processor_without_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, image = tmp_path / "w.safetensors", torch.randn(1, 32, 32, 32)
    write(path, compose())
    half = load_stage(path, "fine", CPU, "bf16", options=InferenceOptions(half_weights=True))
    monkeypatch.setattr("medseg.cascade.stage.inference_precision", lambda *_: "fp32")
    weights = [weight.dtype for weight in half.network.parameters()]
    on_cpu = half._on_cpu()
    full = load_stage(path, "fine", CPU, "fp32").predict_probs(image, InferenceOptions()).probs
    torch.testing.assert_close(
        on_cpu.predict_probs(image, InferenceOptions()).probs, full, rtol=0, atol=0.02
    )
    assert {weight.dtype for weight in on_cpu.network.parameters()} == {torch.float32}
    assert [weight.dtype for weight in half.network.parameters()] == weights


@pytest.mark.parametrize("name", ["block_channels", "num_blocks", "layers"])
def test_arguments_of_any_name_may_be_the_sizes_of_blocks(name: str) -> None:
    """The network of few tensors may have wide ones; `bounded_parts` bounds their number."""
    metadata, _ = read_weights(shipped_weights("lungs", "fine"), "fine", "fine")
    check_ranges({**metadata, "model": {**metadata["model"], name: [32, 64, 128, 256]}})
    with pytest.raises(ValueError, match=f"{name}=.* expected numbers up to 65536"):
        check_ranges({**metadata, "model": {**metadata["model"], name: [-60_000, 60_000]}})


def test_a_file_whose_network_has_far_more_parts_than_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    layer = {"n_features": 1, "kernel_size": 1, "kernels": [1]}
    layers = [layer, {**layer, "repeat": 65536}, layer, layer]
    model = {"_target_": "monai.networks.nets.HighResNet", "layer_params": layers}
    write(path, compose(), model=model)
    with pytest.raises(UserError, match=r"the network has more than \d+ parts, but the file \d+"):
        load_stage(path, "fine", CPU)


def test_weights_may_have_the_smallest_spacing_that_the_reader_takes() -> None:
    metadata, _ = read_weights(shipped_weights("lungs", "fine"), "fine", "fine")
    check_ranges({**metadata, "spacing_mm": [0.005] * 3})
    with pytest.raises(ValueError, match="spacing_mm"):
        check_ranges({**metadata, "spacing_mm": [1e-5] * 3})


def test_a_checkpoint_of_a_pretrained_network_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose()
    node = {
        "_target_": "monai.networks.nets.FlexibleUNet",
        "backbone": "resnet18",
        "pretrained": True,
    }
    monkeypatch.setattr(
        stages, "read_weights", lambda *_: (make_metadata(config, {}) | {"model": node}, {})
    )
    seen: list[dict[str, Any]] = []

    def described(model: dict[str, Any], *_: Any, **__: Any) -> StageNetwork:
        seen.append(model)
        raise ValueError

    monkeypatch.setattr(stages, "make_described_network", described)
    with pytest.raises(UserError):
        load_stage(Path("f.ckpt"), "fine", torch.device("cpu"))
    assert seen == [{**node, "pretrained": False}]


def test_a_bound_on_dice_comes_from_the_file_and_nonsense_is_refused(tmp_path: Path) -> None:
    path, bound = tmp_path / "w.safetensors", {"factor": 2.5, "level": 0.9, "num_patients": 20}
    write(path, compose())
    assert load_stage(path, "fine", CPU).dice_bound is None
    write(path, compose(), dice_bound=bound)
    assert load_stage(path, "fine", CPU).dice_bound == DiceBound(2.5, 0.9, 20)
    for changes in (
        {"factor": "much"},
        {"factor": -1.0},
        {"level": 1.0},
        {"num_patients": 0},
        {"colour": "red"},
    ):
        write(path, compose(), dice_bound=bound | changes)
        with pytest.raises(UserError, match="its metadata are damaged or of another version"):
            load_stage(path, "fine", CPU)


@pytest.mark.parametrize("changes", [{"model": None}, {"model": 7}])
def test_metadata_without_a_network_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, compose(), **changes)
    with pytest.raises(
        UserError,
        match=r"fine=.*w\.safetensors: (its metadata are damaged or of another version|.*model)",
    ):
        load_stage(path, "fine", CPU, "fp32")
