# %% [markdown]
# # First segmentation
#
# Both lungs of a CT from Python: segment, read the figures, look at the result, score it. The scan
# is synthetic; give the path of a chest CT of your own instead. The cells take about half a minute
# on two processor cores.

# %%
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt

from medseg import LungSegmenter
from medseg.io.read import read_image, read_labels

subprocess.run(
    ["medseg", "phantom", "output=scans", "num_train=1", "num_val=1", "num_test=0"], check=True
)
scan = Path("scans/phantom_000/ct.nii.gz")

# %% [markdown]
# The segmenter is loaded once and takes any number of scans: paths of files, folders of DICOM
# series, or SimpleITK images.

# %%
segmenter = LungSegmenter()
result = segmenter.segment(scan)
for label, volume_ml in result.volumes_ml.items():
    print(f"{label}: {volume_ml:.0f} ml, mean {result.statistics[label]['mean_hu']:.0f} HU")
print("warnings:", result.warnings or "none")
print(
    "agreement of the two stages:",
    {region: round(dice, 3) for region, dice in result.agreements.items()},
)

# %% [markdown]
#     left_lung: 1650 ml, mean -819 HU
#     right_lung: 2105 ml, mean -822 HU
#     warnings: none
#     agreement of the two stages: {'left_lung': 0.975, 'right_lung': 0.976}
#
# The label map lies on the grid of the scan: 1 is the patient's left lung, 2 the right one. Arrays
# are (z, y, x).

# %%
image, labels = read_image(scan), result.labels
middle = image.array.shape[0] // 2
figure, axes = plt.subplots(figsize=(5, 5))
axes.imshow(image.array[middle], cmap="gray", vmin=-1000, vmax=400)
axes.contour(labels.array[middle], levels=[0.5, 1.5], colors=["tab:cyan", "tab:orange"])
axes.set_axis_off()
figure.savefig("lungs.png", bbox_inches="tight", dpi=120)

# %% [markdown]
# ![Axial slice of a synthetic chest CT with the outlines of both lungs](../docs/notebook_lungs.jpg)
#
# A phantom has exact labels, so its Dice can be computed. `medseg evaluate` does this for whole
# folders, with surface distances.

# %%
reference = read_labels(scan.with_name("lungs.nii.gz")).array
for value, label in enumerate(result.volumes_ml, start=1):
    is_found, is_reference = labels.array == value, reference == value
    dice = 2 * (is_found & is_reference).sum() / (is_found.sum() + is_reference.sum())
    print(f"{label}: Dice {dice:.3f}")
    assert dice > 0.9

# %% [markdown]
#     left_lung: Dice 0.989
#     right_lung: Dice 0.990
