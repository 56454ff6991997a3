"""The `medseg` program: completion of its command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from medseg.commands.cli import COMPLETION
from medseg.commands.entry import COMMANDS


@pytest.mark.skipif(sys.platform == "win32", reason="the completion is for bash and zsh")
def test_bash_completes_commands_keys_and_values() -> None:
    script = f"""
        medseg() {{ "{sys.executable}" -m medseg.commands.cli "$@"; }}
        {COMPLETION.format(commands=" ".join(COMMANDS))}
        complete_line() {{
            read -ra COMP_WORDS <<< "$1"
            COMP_LINE="$1" COMP_POINT="${{#1}}" COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            _medseg medseg "${{COMP_WORDS[$COMP_CWORD]}}"
            echo "${{COMPREPLY[*]}}"
        }}
        complete_line "medseg pr"
        complete_line "medseg train stage=fine loss=dice_"
    """
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, encoding="utf-8", check=True
    )
    assert result.stdout.splitlines() == [
        "prepare predict",
        "loss=dice_ce loss=dice_ce_presence loss=dice_focal",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="the completion is for bash and zsh")
def test_bash_completes_the_word_at_the_cursor() -> None:
    script = f"""
        medseg() {{ echo "$COMP_LINE"; }}
        {COMPLETION.format(commands=" ".join(COMMANDS))}
        COMP_WORDS=(medseg train stage=f loss=dice_) COMP_CWORD=2
        COMP_LINE="medseg train stage=f loss=dice_" COMP_POINT=20
        _medseg medseg "stage=f"
        printf '%s\n' "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, encoding="utf-8", check=True
    )
    assert result.stdout.splitlines() == [r"medseg\ stage=f"]


@pytest.mark.skipif(sys.platform == "win32", reason="the completion is for bash and zsh")
@pytest.mark.parametrize(
    ("breaks", "completed"), [(" :", "30,b 45"), (" ", "data.cases=10:30,b data.cases=10:45")]
)
def test_bash_completes_what_follows_a_colon_where_it_breaks_words(
    breaks: str, completed: str
) -> None:
    script = f"""
        medseg() {{ printf '%s\n' data.cases=10:30,b data.cases=10:45; }}
        COMP_WORDBREAKS="{breaks}="
        {COMPLETION.format(commands=" ".join(COMMANDS))}
        COMP_WORDS=(medseg train data.cases=10 :) COMP_CWORD=3
        COMP_LINE="medseg train data.cases=10:" COMP_POINT=27
        _medseg medseg ""
        echo "${{COMPREPLY[*]}}"
    """
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, encoding="utf-8", check=True
    )
    assert result.stdout.splitlines() == [completed]
