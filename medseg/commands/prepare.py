"""The `prepare` command: audits every case and fills the cache at the spacing of each stage."""

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
from medseg.task import Channel, LabelValues, Task
from medseg.task_options import make_task
from medseg.wording import format_ml


def prepare(config: PrepareConfig) -> int:
    """Audit every case and resample it once per spacing; a failing case does not stop the others.

    Returns:
        0, or 1 if a case cannot be used.
    """
    task = make_task(config.task)
    spacings = []
    for options in config.spacings.values():
        # Fills in a spacing that depends on the cases.
        find_spacing(options, config.data, config.task)
        spacings.append((options.target_spacing_mm, options.resampling.value))
    cases = _cases_to_prepare(config)
    output = Path(config.output)
    check_writable(output)
    audited_cases = []
    slices = []
    prepared = prepare_cases(cases, Path(config.data.cache), task, spacings)
    for audited, scan in track(prepared, "prepare", total=len(cases)):
        audited_cases.append(audited)
        case_slices: Sequence[Slice] = ()
        if scan is not None:  # a case that cannot be read has none
            image = shown_image(scan.image_hu, task.channels[0])
            labels = shown_labels(scan.labels, task)
            case_slices = cut_slices(image, labels, scan.grid.spacing_mm)
        slices.append(case_slices)
        print_case(audited)
    # Copies and outliers are found only once all cases are read.
    audited_cases = compare_cases(audited_cases)
    for audited in audited_cases:
        print_findings(audited.case, audited.comparison)
    replace_text(output / "audit.csv", audit_csv(audited_cases))
    pictures = draw(audited_cases, slices, output / "audit.png", task)
    print(summary(audited_cases, [output / "audit.csv", *pictures]), flush=True)
    unusable = [audited.case.name for audited in audited_cases if audited.status != READY]
    if unusable:
        say(f"{len(unusable)} of {len(audited_cases)} cases cannot be used: {', '.join(unusable)}")
        return EXIT_FAILED
    return 0


def _cases_to_prepare(config: PrepareConfig) -> list[tuple[Case, LabelValues]]:
    """List all cases with their label values, without test cases that have no labels."""
    cases = []
    num_left_out = 0
    for group, label_values in find_cases(config.data, config.task):
        for case in group:
            if case.labels is None and case.split == "test":
                num_left_out += 1
                continue
            cases.append((case, label_values))
    if num_left_out:
        say(
            f"{count(num_left_out, 'test case')} without labels: only predict uses them, "
            "so they are not prepared"
        )
    return cases


def shown_labels(labels: np.ndarray | None, task: Task) -> np.ndarray | None:
    """Drop ignored voxels from a label map (D, H, W): they choose no slice of the picture."""
    if labels is None or task.ignore_label is None:
        return labels
    return np.where(labels == task.ignore_label, 0, labels)


def shown_image(image: np.ndarray, channel: Channel) -> np.ndarray:
    """Prepare an image (D, H, W) for the picture: without a window, values go to [-1, 1]."""
    # Where the channel has a window, the picture applies it.
    if channel.window_hu:
        return image
    return normalise(image, percentile(image, channel.modality))


def print_case(audited: AuditedCase) -> None:
    """Print the result of one case.

    Its size and volumes go to the standard output, its problems to the error stream.
    """
    case = audited.case
    if audited.failure:
        say(with_case_name(case.name, audited.failure, [case.image, case.labels]))
        return
    if audited.status == READY and audited.audit is not None:
        print(f"{case.name}: {audit_text(audited.audit)}", flush=True)
    print_findings(case, audited.findings())


def print_findings(case: Case, findings: Sequence[Finding]) -> None:
    """Print findings with the code by which they can be ignored.

    Findings that are mere information are only in the table.
    """
    for finding in findings:
        is_information = finding.severity is Severity.information
        if is_information or finding.code in case.ignore_findings:
            continue
        level = "refused" if finding.severity is Severity.error else "warning"
        say(f"{case.name}: {level} ({finding.code}): {finding}")


def audit_text(audit: CaseAudit) -> str:
    """Format size, spacing and volumes in one line."""
    shape = "×".join(map(str, audit.grid.shape))
    spacing = "×".join(f"{mm:.3g}" for mm in audit.grid.spacing_mm)
    volumes = [f"{name} {format_ml(volume_ml)} ml" for name, volume_ml in audit.volumes_ml.items()]
    return ", ".join([f"{shape} at {spacing} mm", *volumes])


def draw(
    audited_cases: Sequence[AuditedCase],
    slices: Sequence[Sequence[Slice]],
    path: Path,
    task: Task,
) -> list[Path]:
    """Draw all cases, those with errors first, then those with warnings.

    Args:
        audited_cases: Cases with their findings, in the order of `slices`.
        slices: Slices of each case, see `cut_slices`; none for a case that cannot be read.
        path: PNG file.
        task: Labels and channels.

    Returns:
        The files: `path`, and further ones where one picture cannot hold all cases.
    """
    views = []
    for audited, case_slices in zip(audited_cases, slices, strict=True):
        views.append(_view(audited, case_slices))
    views.sort(key=_urgency)
    names = {value: name for name, value in task.labels.items()}
    return audit_pictures(
        views,
        path,
        count(len(views), "case"),
        label_names=names,
        window_hu=task.channels[0].window_hu,
    )


def _view(audited: AuditedCase, case_slices: Sequence[Slice]) -> CaseView:
    """Collect the slices and texts of the picture of a case."""
    findings = []
    if audited.failure:
        findings.append((Severity.error.value, audited.failure))
    for finding in audited.findings():
        findings.append((finding.severity.value, f"{finding.code}: {finding.message}"))
    text = ""
    if audited.audit is not None:
        text = audit_text(audited.audit)
    return CaseView(audited.case.name, text, case_slices, findings)


def _urgency(view: CaseView) -> int:
    """Sort key of a case: 0 with errors, 1 with warnings, else 2."""
    severities = {severity for severity, _ in view.findings}
    if Severity.error.value in severities:
        return 0
    if Severity.warning.value in severities:
        return 1
    return 2


def summary(audited_cases: Sequence[AuditedCase], files: Sequence[Path]) -> str:
    """Format the last line: numbers of cases by status, of warnings by code, and the files."""
    statuses = Counter(audited.status for audited in audited_cases)
    codes: Counter[str] = Counter()
    for audited in audited_cases:
        for finding in audited.findings():
            if finding.severity is Severity.warning:
                codes[finding.code] += 1
    states = ", ".join(f"{number} {status}" for status, number in statuses.items())
    warnings = count(codes.total(), "warning")
    if codes:
        numbers = ", ".join(f"{code} {number}" for code, number in codes.most_common())
        warnings = f"{warnings} ({numbers})"
    file_names = ", ".join(map(str, files))
    return f"{count(len(audited_cases), 'case')}: {states}; {warnings}; see {file_names}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural where it is not 1."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
