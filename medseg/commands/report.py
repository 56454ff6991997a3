"""The `report` command: compares all runs below a folder on one page and in one table."""

from pathlib import Path

from medseg.config.schema import ReportConfig
from medseg.errors import UserError
from medseg.runs.past_runs import write_report
from medseg.wording import counted


def report(config: ReportConfig) -> int:
    """Write `report.html` and `report.csv` over the runs of a folder.

    Where there is a baseline, `differences.csv` compares the other runs with it.

    Raises:
        UserError: If the folder does not exist or has no run, or the baseline is none of its runs.
    """
    folder = Path(config.runs).absolute()
    if not folder.is_dir():
        raise UserError(f"runs={config.runs}: there is no such folder")
    output = Path(config.output or folder).absolute()
    comparison = write_report(folder, output, config.num_pictures, config.baseline)
    runs = counted(len(comparison.runs), "run")
    print(f"{runs}: {output / 'report.html'}, {output / 'report.csv'}")
    if comparison.verdict:
        print(comparison.verdict)
    return 0
