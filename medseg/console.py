"""Messages to the user on the error stream."""

import sys


def say(message: str) -> None:
    """Tell the user something on the error stream, so that results can be piped."""
    print(f"medseg: {message}", file=sys.stderr, flush=True)
