"""The `prepare` command: audit every case, fill the cache at the spacing of each stage, and say what was found."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.build.spacing import find_spacing
from medseg.commands import entry
from medseg.config.schema import PrepareConfig
from medseg.console import say
from medseg.data.audit.case import CaseAudit
from medseg.data.audit.finding import Finding, Severity
from medseg.data.audit.table import READY, AuditedCase, audit_csv, compare_cases
from medseg.data.case_table import Case
from medseg.data.task import Task
from medseg.errors import EXIT_FAILED, UserError
from medseg.io.replacing import check_writable
from medseg.runs.folder import replace_text

if TYPE_CHECKING:
    from medseg.pictures.audit import Slice


def main() -> None:
    """Compose, check, prepare."""
    entry.run("prepare", PrepareConfig, prepare)


@dataclass(frozen=True)
class Prepared:
    """What became of one case, and what there is to look at."""

    audited: AuditedCase
    slices: Sequence[Slice] = ()


def prepare(config: PrepareConfig) -> int:
    """Audit every case and resample it once per spacing; a bad case is told and the others go on.

    Returns:
        0, or 1 when a case cannot be used.
    """
    from rich.progress import track

    from medseg.build.cases import find_cases
    from medseg.build.objects import make_task

    task = make_task(config.task)
    for spacing in config.spacings.values():
        find_spacing(spacing, config.data)
    cases = [(case, label_values) for group, label_values in find_cases(config.data) for case in group]
    output = Path(config.output)
    check_writable(output)
    prepared = []
    for case, label_values in track(cases, "prepare"):
        prepared.append(prepare_one(config, task, case, label_values))
        tell(prepared[-1].audited)
    audited = compare_cases([one.audited for one in prepared])
    for one in audited:
        for finding in one.compared:
            tell_finding(one.case, finding)
    replace_text(output / "audit.csv", audit_csv(audited))
    pictures = draw(audited, [one.slices for one in prepared], output / "audit.png", task)
    print(summary(audited, [output / "audit.csv", *pictures]), flush=True)
    unusable = [one for one in audited if one.status != READY]
    if not unusable:
        return 0
    say(f"{len(unusable)} of {len(audited)} cases cannot be used: {', '.join(one.case.name for one in unusable)}")
    return EXIT_FAILED


def prepare_one(config: PrepareConfig, task: Task, case: Case, label_values: dict[int, str]) -> Prepared:
    """Audit one case and put it into the cache; its files are read once, and not at all where the cache is current."""
    from medseg.data.cache import prepare_case
    from medseg.data.source_case import CaseRefusedError, read_source
    from medseg.pictures.audit import cut_slices

    read = functools.cache(lambda: read_source(case, task, label_values))
    slices: Sequence[Slice] = ()
    audit = None
    try:
        for spacing in config.spacings.values():
            spacing_mm, resampling = spacing.target_spacing_mm, spacing.resampling.value
            one = prepare_case(case, Path(config.data.cache), spacing_mm, task, label_values, resampling=resampling, read=read)
            # The spacings differ in what they lose.
            findings = dict.fromkeys([*(audit.findings if audit else ()), *one.audit.findings])
            audit = replace(one.audit, findings=tuple(findings))
            slices = slices or cut_slices(one.image_hu, one.labels, one.grid.spacing_mm)
    except CaseRefusedError as error:
        return Prepared(AuditedCase(case, error.audit), error.slices)
    except Exception as error:  # also a defect or a lack of memory costs one case only
        logging.getLogger(__name__).debug("%s", case.name, exc_info=True)
        return Prepared(AuditedCase(case, audit, failure=str(error) if isinstance(error, UserError) else repr(error)), slices)
    return Prepared(AuditedCase(case, audit), slices)


def tell(one: AuditedCase) -> None:
    """Say what became of a case: one line on the standard output, what is wrong with it on the error stream."""
    name = one.case.name
    if one.failure:
        say(f"{name}: {one.failure}")
        return
    assert one.audit is not None, "what did not fail was audited"
    if one.status == READY:
        print(f"{name}: {describe(one.audit)}", flush=True)
    for finding in one.findings():
        tell_finding(one.case, finding)


def tell_finding(case: Case, finding: Finding) -> None:
    """Say one finding, with the code by which it can be ignored; notes are in the table only."""
    if finding.severity is not Severity.note and finding.code not in case.ignored:
        what = "refused" if finding.severity is Severity.error else "warning"
        say(f"{case.name}: {what} ({finding.code}): {finding}")


def describe(audit: CaseAudit) -> str:
    """Size, spacing and volumes for a line."""
    shape = "×".join(map(str, audit.grid.shape))
    spacing = "×".join(f"{mm:.3g}" for mm in audit.grid.spacing_mm)
    return ", ".join([f"{shape} at {spacing} mm", *(f"{name} {ml:.0f} ml" for name, ml in audit.volumes_ml.items())])


def draw(audited: Sequence[AuditedCase], slices: Sequence[Sequence[Slice]], path: Path, task: Task) -> list[Path]:
    """Draw all cases, those with errors first, then those with warnings; returns the files."""
    from medseg.pictures.audit import Card, audit_pictures

    cards = []
    for one, shown in zip(audited, slices, strict=True):
        findings = [("error", one.failure)] if one.failure else []
        findings += [(finding.severity.value, f"{finding.code}: {finding.message}") for finding in one.findings()]
        cards.append(Card(one.case.name, describe(one.audit) if one.audit else "", shown, findings))
    ranks = ["error", "warning", "note", ""]
    cards.sort(key=lambda card: min((ranks.index(severity) for severity, _ in card.findings if severity != "note"), default=3))
    names = {value: name for name, value in task.labels.items()}
    return audit_pictures(cards, path, count(len(cards), "case"), label_names=names, window_hu=task.window_hu)


def summary(audited: Sequence[AuditedCase], files: Sequence[Path]) -> str:
    """The last line: how many cases are ready, how many findings of each kind, and where to read on."""
    statuses = Counter(one.status for one in audited)
    codes = Counter(finding.code for one in audited for finding in one.findings() if finding.severity is Severity.warning)
    found = count(codes.total(), "warning")
    if codes:
        found += f" ({', '.join(f'{code} {number}' for code, number in codes.most_common())})"
    states = ", ".join(f"{number} {status}" for status, number in statuses.items())
    return f"{count(len(audited), 'case')}: {states}; {found}; see {', '.join(map(str, files))}"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"
