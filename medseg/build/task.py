"""Task of a run: labels with codes and colours, regions, channels and plausible volumes."""

from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from medseg.config.folder import conf_dir
from medseg.config.schema import StageName, TaskConfig, TrainConfig
from medseg.data.task import Channel, Region, Task


def make_task(config: TaskConfig) -> Task:
    """Make the task of a configuration."""
    regions = tuple(
        Region(name, tuple(region.labels), region.side.value if region.side else None)
        for name, region in (config.regions or {}).items()
    )
    channels = [Channel(one.modality.value, one.window_hu, one.normalise.value) for one in config.channels or ()]
    return Task(
        config.name,
        dict(config.labels),
        regions,
        tuple(channels or [Channel(window_hu=config.window_hu)]),
        config.least_hu,
        config.ignore_label,
        {name: (low_ml, high_ml) for name, (low_ml, high_ml) in (config.volume_ml or {}).items()},
        _texts(config.codes),
        dict(config.colours or {}),
    )


def _texts(codes: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Convert codes to texts; YAML reads digits as a number."""
    return {name: tuple(map(str, code)) for name, code in (codes or {}).items()}


def with_known_labels(task: Task) -> Task:
    """Add what `conf/task/<name>.yaml` knows of labels to the task of an older checkpoint without it, if the labels agree.

    These are plausible volumes, codes and colours.
    """
    path = conf_dir() / "task" / f"{task.name}.yaml"
    if not task.name.isidentifier() or not path.is_file():
        return task
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    known = found.get("task", found)
    if known["labels"] != task.labels:
        return task
    ranges_ml = {name: (float(low_ml), float(high_ml)) for name, (low_ml, high_ml) in (known.get("volume_ml") or {}).items()}
    return replace(
        task,
        volume_ml=task.volume_ml or ranges_ml,
        codes=task.codes or _texts(known.get("codes")),
        colours=task.colours or dict(known.get("colours") or {}),
    )


def count_classes(config: TrainConfig) -> int:
    """Count the classes of the stage's network, with the background."""
    task = make_task(config.task)
    return task.num_region_classes if config.stage.name is StageName.fine else task.num_classes
