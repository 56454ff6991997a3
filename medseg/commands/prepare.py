"""The `prepare` command: audits every case, fills the cache at the spacing of each stage, and prints the findings."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import track

from medseg.config.schema import PrepareConfig
from medseg.console import say
from medseg.data.audit.finding import CaseAudit
from medseg.data.audit.table import READY, AuditedCase, audit_csv, compare_cases
from medseg.data.cache import prepare_cases
from medseg.data.case_table import Case
from medseg.data.cases import find_cases
from medseg.data.spacing import find_spacing
from medseg.errors import EXIT_FAILED
from medseg.findings import Finding, Severity
from medseg.io.atomic import check_writable, replace_text
from medseg.io.inputs import with_case_name
from medseg.preprocess.intensity import normalise, percentile
from medseg.report.audit_pictures import CaseView, Slice, audit_pictures, cut_slices
from medseg.task import Channel, Task
from medseg.task_options import make_task


def prepare(config: PrepareConfig) -> int:
    """Audit every case and resample it once per spacing; a failing case does not stop the others.

    Returns:
        0, or 1 if a case cannot be used.
    """
    task = make_task(config.task)
    for spacing in config.spacings.values():
        find_spacing(spacing, config.data, config.task)
    targets = [
        (spacing.target_spacing_mm, spacing.resampling.value)
        for spacing in config.spacings.values()
    ]
    found = [
        (case, label_values)
        for group, label_values in find_cases(config.data, config.task)
        for case in group
    ]
    cases = [
        (case, label_values)
        for case, label_values in found
        if case.labels is not None or case.split != "test"
    ]
    if len(cases) < len(found):
        say(
            f"{count(len(found) - len(cases), 'test case')} without labels: only predict uses them, so they are not prepared"
        )
    output = Path(config.output)
    check_writable(output)
    audited, slices = [], []
    for one, scan in track(
        prepare_cases(cases, Path(config.data.cache), task, targets), "prepare", total=len(cases)
    ):
        audited.append(one)
        slices.append(
            cut_slices(
                shown_image(scan.image_hu, task.channels[0]), scan.labels, scan.grid.spacing_mm
            )
            if scan
            else ()
        )
        print_case(one)
    audited = compare_cases(audited)
    for one in audited:
        print_findings(one.case, one.compared)
    replace_text(output / "audit.csv", audit_csv(audited))
    pictures = draw(audited, slices, output / "audit.png", task)
    print(summary(audited, [output / "audit.csv", *pictures]), flush=True)
    unusable = [one.case.name for one in audited if one.status != READY]
    if unusable:
        say(f"{len(unusable)} of {len(audited)} cases cannot be used: {', '.join(unusable)}")
    return EXIT_FAILED if unusable else 0


def shown_image(image: np.ndarray, channel: Channel) -> np.ndarray:
    """Prepare an image for the picture: values without a window are mapped to [-1, 1]."""
    return image if channel.window_hu else normalise(image, percentile(image, channel.modality))


def print_case(one: AuditedCase) -> None:
    """Print the result of one case: its size and volumes on the standard output, its problems on the error stream."""
    if one.failure:
        say(with_case_name(one.case.name, one.failure, [one.case.image, one.case.labels]))
    elif one.status == READY and one.audit is not None:
        print(f"{one.case.name}: {audit_text(one.audit)}", flush=True)
    if not one.failure:
        print_findings(one.case, one.findings())


def print_findings(case: Case, findings: Sequence[Finding]) -> None:
    """Print findings with the code by which they can be ignored; information is in the table only."""
    for finding in findings:
        if (
            finding.severity is not Severity.information
            and finding.code not in case.ignore_findings
        ):
            level = "refused" if finding.severity is Severity.error else "warning"
            say(f"{case.name}: {level} ({finding.code}): {finding}")


def audit_text(audit: CaseAudit) -> str:
    """Format size, spacing and volumes in one line."""
    shape = "×".join(map(str, audit.grid.shape))
    spacing = "×".join(f"{mm:.3g}" for mm in audit.grid.spacing_mm)
    return ", ".join(
        [
            f"{shape} at {spacing} mm",
            *(f"{name} {ml:.0f} ml" for name, ml in audit.volumes_ml.items()),
        ]
    )


def draw(
    audited: Sequence[AuditedCase], slices: Sequence[Sequence[Slice]], path: Path, task: Task
) -> list[Path]:
    """Draw all cases, those with errors first, then those with warnings; returns the files."""
    cases = []
    for one, shown in zip(audited, slices, strict=True):
        findings = [("error", one.failure)] if one.failure else []
        findings += [
            (finding.severity.value, f"{finding.code}: {finding.message}")
            for finding in one.findings()
        ]
        cases.append(
            CaseView(one.case.name, audit_text(one.audit) if one.audit else "", shown, findings)
        )
    ranks = ["error", "warning", "information", ""]
    cases.sort(
        key=lambda case: min(
            (ranks.index(severity) for severity, _ in case.findings if severity != "information"),
            default=3,
        )
    )
    names = {value: name for name, value in task.labels.items()}
    return audit_pictures(
        cases,
        path,
        count(len(cases), "case"),
        label_names=names,
        window_hu=task.channels[0].window_hu,
    )


def summary(audited: Sequence[AuditedCase], files: Sequence[Path]) -> str:
    """Format the last line: the number of cases by status and of warnings by code, and the files to read."""
    statuses = Counter(one.status for one in audited)
    codes = Counter(
        finding.code
        for one in audited
        for finding in one.findings()
        if finding.severity is Severity.warning
    )
    states = ", ".join(f"{number} {status}" for status, number in statuses.items())
    numbers = (
        f" ({', '.join(f'{code} {number}' for code, number in codes.most_common())})"
        if codes
        else ""
    )
    return f"{count(len(audited), 'case')}: {states}; {count(codes.total(), 'warning')}{numbers}; see {', '.join(map(str, files))}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"
