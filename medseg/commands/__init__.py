"""Commands of one run, and the table of all; commands of several runs are in `studies`."""

import os
import platform

# OpenBLAS reads this when NumPy and SciPy are loaded, so it comes before all imports of commands.
# They multiply no large matrices, and its threads would only wait: 0.2 s of processor time at each
# start. On other processors torch itself may multiply with OpenBLAS.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
