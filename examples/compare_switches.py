# %% [markdown]
# # Plan, train and compare three switches
#
# What do bf16 and checkpointing save, and what do they cost? First `plan` counts, then a sweep
# trains the same coarse stage three times, and a page compares the runs. The scans are synthetic.
# The cells take a few minutes on two processor cores.

# %%
import csv
import json
import subprocess
from pathlib import Path

MEMORY = ["plain", "amp", "amp_checkpoint"]  # files of conf/memory/
STEPS = 200
EXPERIMENT = [
    "stage=coarse",
    "spacing=isotropic_4mm",
    "data.cases=scans/table.csv",
    "data.cache=cache",
    "logger=none",
]


def medseg(*arguments: str) -> None:
    """Run a command of medseg."""
    subprocess.run(["medseg", *arguments], check=True)


medseg("phantom", "output=scans", "num_train=8", "num_val=2", "num_test=0")

# %% [markdown]
# ## Plan
#
# `plan` takes the arguments of `train`. It counts the bytes of a training step without data and
# without computing. `measure=false` leaves out the seconds, which it would measure on this machine.

# %%
planned_mib = {}
for memory in MEMORY:
    medseg(
        "plan",
        *EXPERIMENT,
        f"memory={memory}",
        "shape=[80,96,96]",
        "measure=false",
        f"output=plan_{memory}.json",
    )
    planned_mib[memory] = json.loads(Path(f"plan_{memory}.json").read_text(encoding="utf-8"))[
        "peak_live_mib"
    ]
print(planned_mib)
assert planned_mib["plain"] > planned_mib["amp"] > planned_mib["amp_checkpoint"]

# %% [markdown] The peaks of live tensors are 129 MiB (fp32), 78 MiB (bf16) and 55 MiB (bf16, √n of
# the blocks checkpointed), on any machine.
#
# ## Train
#
# `-m` trains each value in a process and a run folder of its own. The same command again resumes
# what was interrupted and repeats nothing.

# %%
medseg(
    "train",
    "-m",
    *EXPERIMENT,
    f"memory={','.join(MEMORY)}",
    f"steps={STEPS}",
    "hydra.sweep.dir=sweep",
)

# %% [markdown]
# ## Compare
#
# `comparison.csv` has a line for each run, `report.html` the curves, the pictures of the validation
# cases and the differences between the runs.

# %%
medseg("report", "runs=sweep")
with open("sweep/comparison.csv", encoding="utf-8") as file:
    for run in csv.DictReader(file):
        print(
            f"{run['memory']:15s} Dice {float(run['val_dice_best']):.3f}  {run['seconds_per_step']} s per step  {run['peak_gib']} GiB"
        )
