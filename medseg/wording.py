"""Wording of messages: lists that are cut short, and commands quoted for a shell."""

import os
import shlex
import sys
from collections.abc import Iterable


def first_few(names: Iterable[object], most: int = 5, separator: str = ", ") -> str:
    """Join the first of several names, and count the others.

    Args:
        names: The names; none give an empty text.
        most: Largest number of names that are listed, at least 1.
        separator: Text between two names.

    Example:
        >>> first_few("abc", 2), first_few("ab"), first_few("abc", 1, "; ")
        ('a, b and 1 more', 'a, b', 'a; and 2 more')
    """
    texts = list(map(str, names))
    first_texts = separator.join(texts[:most])
    num_more = len(texts) - most
    if num_more <= 0:
        return first_texts
    # No comma before the last "and".
    end = " " if separator == ", " else separator
    return f"{first_texts}{end}and {num_more} more"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun; the plural is the noun with an "s" unless it is given.

    Example:
        >>> counted(1, "case"), counted(0, "case"), counted(2, "study", "studies")
        ('1 case', '0 cases', '2 studies')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {plural or noun + 's'}"


def quote_for_shell(argument: str) -> str:
    r"""Quote an argument of a printed command.

    Bytes of a name that is not UTF-8, control characters, and characters that the terminal lacks
    are written as their codes in `$'…'`, which bash, zsh and ksh read.

    Example:
        >>> print(quote_for_shell("a b"), quote_for_shell("data.cases=M\udcfcller's"))
        'a b' $'data.cases=M\xfcller\x27s'
    """
    if argument.isprintable() and _can_show(argument):
        return shlex.quote(argument)
    characters = []
    # `fsencode` restores the bytes of a name that is not UTF-8, which Python holds as surrogates.
    for byte in os.fsencode(argument):
        character = chr(byte)
        # A quote would end the text, a backslash would begin a code.
        is_plain = character.isascii() and character.isprintable() and character not in "'\\"
        characters.append(character if is_plain else f"\\x{byte:02x}")
    return f"$'{''.join(characters)}'"


def shell_line(arguments: Iterable[str]) -> str:
    """Join the arguments of a printed command, each quoted where it must be."""
    return " ".join(map(quote_for_shell, arguments))


def _can_show(text: str) -> bool:
    """Whether the encoding of the standard output has all characters of a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def format_ml(volume_ml: float) -> str:
    """Format a volume in ml; one below 10 ml, as of a small lesion, with two digits.

    Example:
        >>> [format_ml(volume_ml) for volume_ml in (0.0, 0.312, 9.96, 1762.25)]
        ['0', '0.31', '10', '1762']
    """
    if volume_ml < 10:
        return f"{volume_ml:.2g}"
    return f"{volume_ml:.0f}"
