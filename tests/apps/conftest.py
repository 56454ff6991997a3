"""Put the oracle networks and the makers of volumes on the path (tests are imported by path, not as packages)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("cascade", "io")]
