"""Tests part of the GPU report: the tests that need a GPU; a skipped test counts as not run."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from benchmarks.instruments import ROOT

MARK = "pytest.mark.gpu"


def measure(session: Session) -> Report:
    """Run the tests with the mark `gpu`; a rehearsal collects them."""
    report = Report()
    folder = session.output / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [f"--junitxml={results}", *map(str, files_with_gpu_tests(ROOT / "tests"))]
    if session.is_rehearsal:
        command.append("--collect-only")
    # Exit code 1 only means that a test failed, which the report says.
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    print(result.stdout, result.stderr, flush=True)
    if session.is_rehearsal:
        # The lines of collected tests: `<file>::<test>`.
        number = sum("::" in line for line in result.stdout.splitlines())
        report.holds("tests are collected", number > 0, f"{number} tests", "at least one")
        return report
    add_results(report, results)
    return report


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """List the test files that have the mark, so that no other one is imported."""
    files = []
    for path in sorted(folder.rglob("test_*.py")):
        # The tests of the benchmarks contain the mark as text, but none of them has it.
        if MARK in path.read_text(encoding="utf-8") and path.parent.name != "benchmarks":
            files.append(path)
    return files


def add_results(report: Report, results: Path) -> None:
    """Add a check for each test that failed or was skipped, and one for all that passed."""
    num_passed = 0
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        failure = case.find("failure")
        # An error comes from a fixture. `or` would not do: an element without children is false.
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            report.holds(name, False, (failure.get("message") or "")[:100], "passes")
        elif skipped is not None:
            report.not_run(name, skipped.get("message") or "skipped")
        else:
            num_passed += 1
    report.holds("tests passed", num_passed > 0, str(num_passed), "at least one")
