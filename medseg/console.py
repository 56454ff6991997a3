"""Messages to the user on the error stream."""

import sys


def say(message: str) -> None:
    """Tell the user something on the error stream, so that results can be piped.

    A control character, as a file name may contain, is written as its code and cannot act on the terminal.
    """
    plain = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in message)
    print(f"medseg: {plain}", file=sys.stderr, flush=True)
