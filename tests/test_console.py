"""Messages cannot act on the terminal."""

from __future__ import annotations

import pytest

from medseg.console import say


def test_control_characters_are_written_as_codes(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\r\x07b\udcff: Größe 3 mm³\nsecond line")
    assert capsys.readouterr().err == "medseg: a\\x1b[2J\\r\\x07b\\udcff: Größe 3 mm³\nsecond line\n"
