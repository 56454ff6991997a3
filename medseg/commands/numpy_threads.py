"""Keeps NumPy and SciPy on one thread; must be imported before them.

OpenBLAS, with which they multiply matrices, starts its threads when it is loaded. medseg multiplies
no large matrices with it, and threads that wait took 0.2 s of processor time at each start.
"""

import os
import platform

# On other processors torch may multiply with OpenBLAS too.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
