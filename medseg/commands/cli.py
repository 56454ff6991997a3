"""The `medseg` program: `medseg <command> key=value …`, the same commands as `train.py` and `scripts/*.py`."""

import sys

from medseg import __version__
from medseg.commands.entry import COMMANDS, run_command

# Commands first, then Hydra's completion of keys, groups and values, which reads the line without the command. `=` does not break words.
COMPLETION = """\
# Completion of medseg for bash and zsh; put this line into ~/.bashrc or ~/.zshrc:  eval "$(medseg --completion)"
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X compinit bashcompinit && compinit && bashcompinit; }}
_medseg() {{
    if [ "$COMP_CWORD" -le 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$2"))
    else
        local rest="${{COMP_LINE#*"${{COMP_WORDS[1]}}"}}"
        local found=$(COMP_LINE="medseg$rest" COMP_POINT=$((${{#rest}} + 6)) medseg "${{COMP_WORDS[1]}}" -sc query=bash 2> /dev/null)
        COMPREPLY=($(compgen -W "$found"))
    fi
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o nospace -o default -F _medseg medseg"""


def main() -> None:
    """Run the command that the first argument names; commands take Hydra's `key=value` arguments."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        # Hydra shows this name in its messages, and launchers start it again.
        sys.argv = [f"medseg {command}", *sys.argv[2:]]
        run_command(command)
    elif command in ("--version", "-V"):
        print(__version__)
    elif command == "--completion":
        print(COMPLETION.format(commands=" ".join(COMMANDS)))
    else:
        is_help = command in ("--help", "-h")
        text = [
            "usage: medseg <command> key=value …   (`medseg <command> --help` prints all keys)",
            "       medseg predict <scan or folder> -o <file or folder>",
            '       medseg --version | --completion   (the latter for bash and zsh: `eval "$(medseg --completion)"`)',
            "",
        ]
        text += [f"  {name:16s}{sentence}" for name, (*_, sentence) in COMMANDS.items()]
        text += [] if is_help else [f"\nmedseg: there is no command {command}"]
        print("\n".join(text), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)


if __name__ == "__main__":
    main()
