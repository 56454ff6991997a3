"""Task of a run: labels, regions, channels and plausible volumes."""

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
    )


def count_classes(config: TrainConfig) -> int:
    """Count the classes of the stage's network, with the background."""
    task = make_task(config.task)
    return task.num_classes if config.stage.name is StageName.coarse else task.num_region_classes
