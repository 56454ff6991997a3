"""Put the tools of the attacks, and the makers of files of the io tests, on the path (tests are imported by path, not as packages)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "io")]
