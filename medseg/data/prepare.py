"""Preparation of a data set: audit of every case, and one cache entry per spacing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from medseg.data.audit.table import AuditedCase
from medseg.data.cache import CachedCase, prepare_case
from medseg.data.case_table import Case
from medseg.data.source_case import CaseRefusedError, SourceCase, read_source
from medseg.data.task import Task
from medseg.errors import UserError

Targets = Sequence[tuple[tuple[float, float, float] | None, str]]
"""Spacing of each cache entry, (z, y, x) or None for that of the scan, and the filter of its image."""


def prepare_cases(
    cases: Iterable[tuple[Case, dict[int, str]]], cache_dir: Path, task: Task, targets: Targets
) -> Iterator[tuple[AuditedCase, CachedCase | SourceCase | None]]:
    """Audit each case and fill the cache; a failing case does not affect the others.

    Args:
        cases: Cases with their label values (value in the file to label name).
        cache_dir: Root of the cache.
        task: Labels and regions.
        targets: Spacings and filters of the cache entries.

    Yields:
        The audit of each case, and its image and labels where they could be read: from the cache, or as read for a refused case.
    """
    for case, label_values in cases:
        yield _prepare(case, label_values, cache_dir, task, targets)


def _prepare(
    case: Case, label_values: dict[int, str], cache_dir: Path, task: Task, targets: Targets
) -> tuple[AuditedCase, CachedCase | SourceCase | None]:
    """Audit one case and fill its cache entries; its files are read once, and not at all if the entries are current."""
    read = functools.cache(lambda: read_source(case, task, label_values))
    audit, first = None, None
    try:
        for spacing_mm, resampling in targets:
            entry = prepare_case(case, cache_dir, spacing_mm, task, label_values, resampling=resampling, read=read)
            # The findings differ between spacings: each may lose other regions.
            findings = dict.fromkeys([*(audit.findings if audit else ()), *entry.audit.findings])
            audit, first = replace(entry.audit, findings=tuple(findings)), first or entry
    except CaseRefusedError as error:
        return AuditedCase(case, error.audit), error.source
    except Exception as error:  # a defect or a lack of memory stops this case only
        logging.getLogger(__name__).debug("%s", case.name, exc_info=True)
        return AuditedCase(case, audit, failure=str(error) if isinstance(error, UserError) else repr(error)), first
    return AuditedCase(case, audit), first
