"""Grid of a stage: the rule for the size of crops, and the target spacing of a data set."""

from collections.abc import Sequence

from medseg.console import say
from medseg.data.case_table import Case
from medseg.data.options import DataOptions
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import GridRule
from medseg.preprocess.options import FOUND_IN_DATA, Fill, SpacingOptions, SpacingStrategy
from medseg.task import Channel
from medseg.task_options import TaskOptions
from medseg.wording import counted, first_few


def make_grid_rule(spacing: SpacingOptions) -> GridRule:
    """Make the rule for the size and the spacing of crops from the options of a strategy."""
    is_cube = spacing.strategy is SpacingStrategy.fixed_resolution
    return GridRule(
        spacing.size, is_cube, is_padded=spacing.fill is Fill.pad, range_mm=spacing.range_mm
    )


def read_scan_grid(case: Case, channels: Sequence[Channel]) -> VoxelGrid:
    """Read the oriented grid of a scan from the header of its first image.

    Args:
        case: The case.
        channels: Channels of the task.

    Raises:
        UserError: If the header cannot be read, or the case has fewer images than channels.
    """
    from medseg.io.read import read_grid
    from medseg.preprocess.orient import oriented_grid

    # A 4D file holds all channels, and `images` repeats it for each channel. The header reader
    # checks that the file has as many volumes as channels.
    num_volumes = case.images(len(channels)).count(case.image)
    grid = read_grid(case.image, case.series, channels[0].modality, num_volumes)
    return oriented_grid(grid)


def find_spacing(spacing: SpacingOptions, data: DataOptions, task: TaskOptions) -> None:
    """Compute the target spacing from the training cases, for a strategy of `FOUND_IN_DATA`.

    Other strategies do not change, nor does a target spacing that the user gave. Cases whose header
    cannot be read do not count.

    Args:
        spacing: Gets the target spacing, in place.
        data: Chooses the cases.
        task: Labels and channels.

    Raises:
        UserError: If the cases cannot be found, or no header can be read.
    """
    if spacing.strategy not in FOUND_IN_DATA or spacing.target_spacing_mm is not None:
        return
    from medseg.data.cases import find_sources
    from medseg.data.crops import typical_spacing_mm
    from medseg.task_options import make_task

    # The first source is the user's table; added phantoms do not count.
    user_source = find_sources(data, task)[0]
    cases = user_source.split.train
    average_name = FOUND_IN_DATA[spacing.strategy]
    channels = make_task(task).channels
    spacings_mm = []
    unread: dict[str, UserError] = {}
    for case in cases:
        try:
            grid = read_scan_grid(case, channels)
        except UserError as error:
            unread[case.name] = error
            continue
        spacings_mm.append(grid.spacing_mm)
    if not spacings_mm:
        raise next(iter(unread.values()))
    spacing.target_spacing_mm = typical_spacing_mm(spacings_mm, average_name)
    numbers = ",".join(f"{mm:g}" for mm in spacing.target_spacing_mm)
    cases_text = counted(len(spacings_mm), "case")
    if unread:
        cases_text += f", without {first_few(unread)}"
    say(f"spacing.target_spacing_mm=[{numbers}]: the {average_name} of {cases_text}")
