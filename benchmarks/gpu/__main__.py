"""Run all parts of the GPU report and write its page.

    make gpu                      # or: python -m benchmarks.gpu <folder>
    SCAN=ct.nii.gz make gpu       # predict a real scan instead of a phantom
    REHEARSAL=1 make gpu          # without a GPU: every part on the CPU, with small shapes

Writes `gpu.md` into the folder after each part. Exit code 0 if every part came to its end and every
check passed; 1 if a part did not come to its end or a check failed; 5 if no check failed, but this
machine cannot make some of them, such as those on two cards. A rehearsal judges no value, only
whether the parts come to an end.
"""

import platform
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.gpu.parts import LIMITS_S, Ending, Session, run_part, session_of
from benchmarks.gpu.report import check_table, outcome
from medseg import __version__
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_USER_ERROR
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table
from medseg.memory.kernels import processor_name

# No check failed, but some could not be made: neither a success nor a failure.
EXIT_INCOMPLETE = 5


def main() -> None:
    """Run all parts, write the page after each, and exit with the code of the whole."""
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu").absolute()
    session = session_of(output)
    if not session.is_rehearsal and not torch.cuda.is_available():
        say(
            "make gpu: torch sees no NVIDIA GPU on this machine; run it on a machine with one, "
            "with a CUDA build of torch, or try the parts on the CPU with REHEARSAL=1"
        )
        sys.exit(EXIT_USER_ERROR)
    if session.scan is not None and not session.scan.exists():
        say(f"SCAN={session.scan}: no such file; give a CT of a chest, or leave it out")
        sys.exit(EXIT_USER_ERROR)
    endings: dict[str, Ending] = {}
    for name in LIMITS_S:
        print(f"{name}: at most {session.limit_s(name):g} s", flush=True)
        endings[name] = run_part(name, session)
        replace_text(output / "gpu.md", page(session, endings))
    print(verdict(session, endings))
    print(output / "gpu.md")
    sys.exit(exit_code(session, endings))


def exit_code(session: Session, endings: Mapping[str, Ending]) -> int:
    """Exit code of the whole report, see the module."""
    if any(ending.problem for ending in endings.values()):
        return EXIT_FAILED
    if session.is_rehearsal:
        return 0
    results: list[bool | None] = []  # None where a check was not made
    for ending in endings.values():
        results += [check.is_met for check in ending.report.checks]
    if False in results:
        return EXIT_FAILED
    if None in results:
        return EXIT_INCOMPLETE
    return 0


def page(session: Session, endings: Mapping[str, Ending]) -> str:
    """Format the page from the parts that have ended so far.

    Below a title, a summary and a table of the parts, each part has a section with its checks,
    sentences and tables.
    """
    rows = [_part_row(name, session, ending) for name, ending in endings.items()]
    sections = [f"# {title(session)}\n", f"{verdict(session, endings)}\n", markdown_table(rows)]
    for name, ending in endings.items():
        sections.append(f"## {name.capitalize()}\n")
        if ending.problem:
            sections.append(f"{ending.problem}\n")
        if ending.report.checks:
            sections.append(check_table(ending.report.checks, session.is_rehearsal))
        sections += ending.report.texts
    return "\n".join(sections)


def title(session: Session) -> str:
    """Name the machine and the versions, or say that this is a rehearsal."""
    python = platform.python_version()
    versions = f"torch {torch.__version__}, medseg {__version__}, Python {python}"
    if session.is_rehearsal:
        return f"REHEARSAL on a CPU ({processor_name()}), {versions}"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    cudnn = torch.backends.cudnn.version()
    card = f"{torch.cuda.get_device_name()} (compute capability {capability})"
    return f"{card}, CUDA {torch.version.cuda}, cuDNN {cudnn}, {versions}"


def verdict(session: Session, endings: Mapping[str, Ending]) -> str:
    """Summarise the report in a sentence."""
    num_problems = sum(bool(ending.problem) for ending in endings.values())
    counts = {"passed": 0, "FAILED": 0, "not run": 0, "not judged": 0}
    for ending in endings.values():
        for check in ending.report.checks:
            counts[outcome(check, session.is_rehearsal)] += 1
    count_texts = [f"{number} checks {name}" for name, number in counts.items() if number]
    checks_text = ", ".join(count_texts) or "no check"
    sentence = f"{len(endings)} parts, {num_problems} without an end; {checks_text}."
    if session.is_rehearsal:
        sentence += " All of it ran on the CPU with small shapes: no value says anything of a GPU."
    return sentence


def _part_row(name: str, session: Session, ending: Ending) -> dict[str, str]:
    """Row of a part in the table at the top of the page."""
    result = ending.problem
    if not result:
        outcomes = Counter(outcome(check, session.is_rehearsal) for check in ending.report.checks)
        result = ", ".join(f"{number} {text}" for text, number in outcomes.items())
    limit = f"{session.limit_s(name):g}"
    return {"part": name, "result": result, "s": f"{ending.seconds:.1f}", "limit s": limit}


if __name__ == "__main__":
    main()
