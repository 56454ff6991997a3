"""Task of a run: labels, regions and HU window."""

from medseg.config.schema import TaskConfig
from medseg.data.task import Region, Task


def make_task(config: TaskConfig) -> Task:
    """Make the task of a configuration."""
    regions = tuple(
        Region(name, tuple(region.labels), region.side.value if region.side else None) for name, region in config.regions.items()
    )
    return Task(config.name, dict(config.labels), regions, config.window_hu, config.least_hu)
