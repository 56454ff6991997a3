# %% [markdown]
# # An organ of your own, from Python
#
# Plan, train, segment and cross-validate a network of one stage without leaving Python. The scans
# are synthetic and show a heart; give a case table or an imported data set of your own instead
# (`"data.cases": "spleen"`). The cells take some minutes on two processor cores.

# %%
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel
import numpy as np

import medseg
from medseg.io.read import read_image

STEPS = 200
phantom_command = (
    "medseg phantom scene=organs task=heart num_train=5 num_val=1 num_test=0 output=scans"
)
subprocess.run(phantom_command.split(), check=True)
keys = {
    "task": "heart",
    "stage": "single",
    "spacing": "isotropic_4mm",
    "stage.patch_size": [48, 48, 48],
    "data.cases": "scans/table.csv",
    "data.cache": "cache",
    "logger": "none",
}

# %% [markdown]
# ## Plan
#
# The keys are those of the commands. `plan` counts the memory of a step before anything runs;
# with `"fit_gib": 2` it would find the switches that fit into 2 GiB.

# %%
planned = medseg.plan({**keys, "measure": False})
print(f"{planned['peak_live_mib']:.0f} MiB at the peak of a step")

# %% [markdown]
# ## Train
#
# The same call again resumes an interrupted training and returns a finished one.

# %%
run = medseg.train("run", {**keys, "steps": STEPS})
print(run.summary["val_dice_best"], run.history[-1]["step"])

# %% [markdown]
# ## Segment
#
# The segmenter takes paths, and images or arrays of other programs. Labels have the type of the
# input: here an image of nibabel, on the grid of the scan.

# %%
segmenter = medseg.Segmenter(single=[run.checkpoint])
held_out = sorted(Path("scans").glob("phantom_*"))[-1]
scan = nibabel.load(held_out / "image.nii.gz")
result = segmenter.segment(scan)
print(result.volumes_ml, result.warnings)
middle = scan.shape[2] // 2
figure, axes = plt.subplots(figsize=(5, 5))
# nibabel's arrays are (x, y, z); the transpose puts y on the vertical axis of the picture.
axes.imshow(scan.get_fdata()[:, :, middle].T, cmap="gray", vmin=-200, vmax=300)
axes.contour(result.labels.get_fdata()[:, :, middle].T, levels=[0.5], colors="tab:cyan")
figure.savefig("heart.png")

# %% [markdown]
# ## Cross-validate
#
# Each scan is segmented by a network that has not seen its patient. `folds/model` is a model of all
# folds, for `medseg.Segmenter(weights="folds/model")` and
# `medseg predict -i <scan> -o labels.nii.gz weights=folds/model`. It has a model card and, where a
# clean-up raised the scores, that clean-up. `folds/pooled.md` has the scores.

# %%
# Cross-validation makes its own split: the validation scan of the table joins the others.
cases = Path("scans/cases.csv")
table = Path("scans/table.csv").read_text(encoding="utf-8")
cases.write_text(table.replace(",val,", ",train,"), encoding="utf-8")
study = medseg.cross_validate(
    "folds", {**keys, "data.cases": str(cases), "num_folds": 2, "steps": STEPS}
)
for region in study.pooled:
    print(region["region"], region["dice"], region["dice_sd"])
print((study.model / "clean_up.md").read_text(encoding="utf-8"))

# %% [markdown]
# The model of all folds, on a scan in memory: a `medseg.Volume` has voxels in the order (z, y, x)
# and the grid that says where they are. Its labels are a `medseg.Volume` too.

# %%
model = medseg.Segmenter(weights=study.model)
volume = read_image(held_out / "image.nii.gz")
labels = model.segment(volume).labels
assert isinstance(labels, medseg.Volume)
assert labels.grid == volume.grid
print(labels.array.shape, np.unique(labels.array))
