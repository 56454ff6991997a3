"""Messages cannot act on the terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from medseg.console import say

PRINT = "from medseg.console import prepare_streams, say\nprepare_streams()\n"


def test_control_characters_are_written_as_codes(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\r\x07b\udcff: Größe 3 mm³\nsecond line")
    assert (
        capsys.readouterr().err == "medseg: a\\x1b[2J\\r\\x07b\\udcff: Größe 3 mm³\nsecond line\n"
    )


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run code after `prepare_streams` in a process of its own."""
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, "-c", PRINT + code]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False, env=environment, **options
    )


@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "utf-8"}],
)
def test_letters_that_the_terminal_lacks_are_written_as_codes(env: dict[str, str]) -> None:
    """Also in a Python process that the command starts."""
    child = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(chr(0x1f601), "
        "chr(0xdcfc))'], check=True)\n"
    )
    done = run_python(f"print(chr(0x1f601), chr(0xdcfc), flush=True)\n{child}", env=env)
    assert done.returncode == 0, done.stderr
    smile = (
        "\N{GRINNING FACE WITH SMILING EYES}"
        if env["PYTHONIOENCODING"] == "utf-8"
        else "\\U0001f601"
    )
    assert done.stdout == f"{smile} \\udcfc\n" * 2


def test_a_closed_stream_writes_to_nowhere_and_not_into_the_next_file() -> None:
    code = "import os, sys\nprint('lost')\nsay('lost too')\nsys.stdout.flush()\n"
    code += "sys.exit(os.open(os.devnull, os.O_RDONLY))"
    command = f'exec "{sys.executable}" -c "$CODE" >&- 2>&-'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CODE": PRINT + code}, check=False
    )
    assert done.returncode > 2, "the next file has another number than the standard streams"


def test_a_reader_of_messages_that_leaves_does_not_end_the_command() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = PRINT + "say('one')\nsay('two')\nprint('done')"
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=writer, stdout=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"done\n")
