# %% [markdown]
# # Plan, train and compare three switches
#
# What do bf16 and checkpointing save, and what do they cost? First `plan` counts, then a sweep
# trains the same coarse stage three times, and a page compares the runs. The scans are synthetic.
# The cells take a few minutes on two processor cores.

# %%
import subprocess

import medseg

MEMORY = ["plain", "amp", "amp_checkpoint"]  # files of conf/memory/
STEPS = 200
KEYS = {
    "stage": "coarse",
    "spacing": "isotropic_4mm",
    "data.cases": "scans/table.csv",
    "data.cache": "cache",
    "logger": "none",
}
phantom_command = "medseg phantom output=scans num_train=8 num_val=2 num_test=0"
subprocess.run(phantom_command.split(), check=True)

# %% [markdown]
# ## Plan
#
# `plan` takes the keys of `train`. It counts the bytes of a training step without data and without
# computing. `measure=false` leaves out the seconds, which it would measure on this machine.

# %%
planned_mib = {}
for memory in MEMORY:
    planned = medseg.plan({**KEYS, "memory": memory, "shape": [80, 96, 96], "measure": False})
    planned_mib[memory] = planned["peak_live_mib"]
print(planned_mib)
assert planned_mib["plain"] > planned_mib["amp"] > planned_mib["amp_checkpoint"]

# %% [markdown]
# The peaks of live tensors are 129 MiB (fp32), 78 MiB (bf16) and 55 MiB (bf16, √n of the blocks
# checkpointed), on any machine.
#
# ## Train
#
# Each run has a folder of its own. The same cell again resumes what was interrupted and repeats
# nothing.

# %%
runs = {}
for memory in MEMORY:
    runs[memory] = medseg.train(f"sweep/{memory}", {**KEYS, "memory": memory, "steps": STEPS})

# %% [markdown]
# ## Compare
#
# `summary` has the figures of a run. `report.html` has the curves, the pictures of the validation
# cases and the differences between the runs.

# %%
for memory, run in runs.items():
    figures = run.summary
    costs = f"{figures['seconds_per_step']} s per step  {figures['peak_gib']} GiB"
    print(f"{memory:15s} Dice {figures['val_dice_best']:.3f}  {costs}")
subprocess.run(["medseg", "report", "runs=sweep"], check=True)
