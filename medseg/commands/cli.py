"""The `medseg` program: `medseg <command> key=value …`."""

import difflib
import sys

from medseg import __version__
from medseg.commands.entry import COMMANDS, run_command
from medseg.console import prepare_streams, say
from medseg.errors import EXIT_USER_ERROR

# Shell script that completes the command, then keys, groups and values. `-sc query=bash` is Hydra's
# `--shell-completion`, which prints one candidate a line.
#
# Bash splits the typed text at the characters of COMP_WORDBREAKS and replaces the last piece only.
# The script removes `=` from these characters. Other programs need `:`, so it stays, and the typed
# text up to the last colon is cut off each candidate.
#
# The line is completed at the cursor, COMP_POINT; what follows the cursor is cut off. Hydra takes
# the first word of COMP_LINE for the program, so the command is left out of it: `medseg train
# stage=f` becomes `medseg stage=f`.
#
# `printf %q` escapes too much: `save=[labels,masks]` becomes `save=\[labels\,masks\]`. The lines
# after it remove the backslashes before brackets and commas again.
#
# Braces of the shell are doubled: the text goes through `str.format`.
COMPLETION = r"""# Completion of medseg for bash and zsh; put this line into ~/.bashrc or ~/.zshrc:
#   eval "$(medseg --completion)"
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X compinit bashcompinit && compinit && bashcompinit; }}
_medseg() {{
    local line to_cursor rest typed before_colon
    COMPREPLY=()
    if [ "$COMP_CWORD" -le 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$2"))
        return
    fi
    to_cursor="${{COMP_LINE:0:$COMP_POINT}}"
    # The line after the command.
    rest="${{to_cursor#*"${{COMP_WORDS[1]}}"}}"
    typed="${{to_cursor##* }}"
    before_colon=""
    if [[ "$COMP_WORDBREAKS" == *:* && "$typed" == *:* ]]; then
        before_colon="${{typed%:*}}:"
    fi
    while IFS= read -r line; do
        line="${{line#"$before_colon"}}"
        # zsh quotes what it inserts; bash does not.
        [ -n "$ZSH_VERSION" ] || printf -v line %q "$line"
        line="${{line//\\[/[}}"
        line="${{line//\\]/]}}"
        [ -z "$line" ] || COMPREPLY+=("${{line//\\,/,}}")
    done < <(COMP_LINE="medseg$rest" medseg "${{COMP_WORDS[1]}}" -sc query=bash 2> /dev/null)
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o nospace -o default -F _medseg medseg"""

USAGE = """\
usage: medseg <command> key=value …   (`medseg <command> --help` prints all keys)
       medseg predict <scan or folder> -o <file or folder>
       medseg --version
       medseg --completion   (for bash and zsh: `eval "$(medseg --completion)"`)
"""
# Command of another program to the command of medseg that does the same.
FOREIGN_COMMANDS = {
    "fit": "train",
    "test": "evaluate",
    "validate": "evaluate",
    "eval": "evaluate",
    "score": "evaluate",
    "inference": "predict",
    "infer": "predict",
    "segment": "predict",
    "preprocess": "prepare",
    "convert": "import",
    "tune": "search",
    "sweep": "search",
}


def main() -> None:
    """Run the command that the first argument names, with Hydra's `key=value` arguments."""
    prepare_streams()
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        # Hydra shows this name in its messages.
        sys.argv = [f"medseg {command}", *sys.argv[2:]]
        run_command(command)
        return
    if command in ("--version", "-V"):
        print(__version__)
        return
    if command == "--completion":
        print(COMPLETION.format(commands=" ".join(COMMANDS)))
        return
    if command in ("--help", "-h"):
        print(USAGE)
        for name, listed in COMMANDS.items():
            print(f"  {name:16s}{listed.sentence}")
        return
    say(unknown_command(command))
    sys.exit(EXIT_USER_ERROR)


def unknown_command(command: str) -> str:
    """Say that there is no such command, and which one was probably meant.

    Example:
        >>> unknown_command("predcit")
        'there is no command predcit; did you mean predict? `medseg --help` lists all commands'
    """
    names = [*COMMANDS, *FOREIGN_COMMANDS]
    typed = command.lower().replace("-", "_")
    guess = ""
    matches = difflib.get_close_matches(typed, names, n=1)
    if matches:
        name = FOREIGN_COMMANDS.get(matches[0], matches[0])
        guess = f"did you mean {name}? "
    return f"there is no command {command}; {guess}`medseg --help` lists all commands"


if __name__ == "__main__":
    main()
