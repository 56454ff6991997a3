"""Which cases of a batch are finished: their files are whole, and predicting again would give the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medseg import __version__
from medseg.data.source_files import fingerprint, is_same_source
from medseg.errors import UserError


def results_of(paths: list[Path]) -> dict[str, Any]:
    """Note what was written, by its place in the order of writing."""
    return {path.name: fingerprint(path)["sha256"] for path in paths}


def is_finished(scan: Path, outputs: list[Path], report: Path, settings: dict[str, Any]) -> bool:
    """Whether a case need not be predicted again.

    Its report, which is written last, must be there; the label map must be the one that the report was written with; and the
    scan's content, the checkpoints' and all settings that can change the result must be what they were.

    Args:
        scan: Where the scan lies now.
        outputs: Files that a prediction would write beside the report.
        report: Its `<case>.json`.
        settings: What the result follows from beside the scan, in plain types.
    """
    try:
        known = json.loads(report.read_text(encoding="utf-8"))
        return bool(
            known["version"] == __version__
            and known["settings"] == json.loads(json.dumps(settings))
            and known["results"] == results_of(outputs)
            and is_same_source(scan, known["source"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return False  # not there, damaged, of an older version, or not readable: the prediction will tell
