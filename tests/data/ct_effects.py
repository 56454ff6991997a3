"""Effects of `augment=ct` with other values, for tests."""

from __future__ import annotations

from typing import Any

import yaml

from medseg.conf_folder import conf_dir
from medseg.data.transforms import Transforms
from medseg.training.extensions import make_effects

CT: dict[str, Any] = yaml.safe_load(
    (conf_dir() / "augment" / "ct.yaml").read_text(encoding="utf-8")
)


def effects(**values: Any) -> Transforms:
    """The effects of `augment=ct` with some other values."""
    fixed = {"window_hu": (-1000.0, 400.0), "organ_values": range(1, 255)}
    return Transforms(make_effects({**CT, **fixed, **values}))
