"""Planner of `configure`: predicts memory and time of a setting as `medseg plan` does."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra

from medseg.config.check import to_config
from medseg.config.experiment_file import register_experiments
from medseg.config.overrides import text_of
from medseg.config.schema import PlanConfig
from medseg.data.options import StageName
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.knob import Triple
from medseg.planning.estimate import Machine, estimate
from medseg.planning.step import evaluated_shape, input_shape
from medseg.studies.configure.choose import Prediction
from medseg.studies.configure.setting import Setting, experiment_text
from medseg.task import Task
from medseg.training.network import find_divisor

GIB = 2**30


class MachinePlanner:
    """Predictions of memory and time on this machine; each setting is predicted once.

    Args:
        task: Labels and channels.
        largest_mm: Stage to the lengths of its largest input, (z, y, x), whose validation takes the
            most memory.
        arguments: The user's arguments of `train`.
        file: File that is overwritten with the experiment of each setting, from which Hydra
            composes the configuration.
    """

    def __init__(
        self,
        task: Task,
        largest_mm: Mapping[StageName, Triple],
        arguments: Sequence[str],
        file: Path,
    ) -> None:
        self.task = task
        self.largest_mm = largest_mm
        self.arguments = arguments
        self.file = file
        # Measured at the first prediction.
        self.machine: Machine | None = None
        # Cached by setting: a prediction takes seconds.
        self.divisor = functools.cache(self._divisor)
        self.predict = functools.cache(self._predict)

    def _divisor(self, setting: Setting) -> Shape:
        """Required multiple of a patch, (z, y, x)."""
        return find_divisor(self._config(setting))

    def _predict(self, setting: Setting) -> Prediction:
        """Predict memory and time of a training."""
        config = self._config(setting)
        if self.machine is None:
            self.machine = Machine(config)
        prediction = estimate(config, input_shape(config), evaluated_shape(config), self.machine)
        return Prediction(prediction.peak_resident / GIB, prediction.seconds_per_step)

    def _config(self, setting: Setting) -> PlanConfig:
        """Compose the configuration of a setting as `plan` would."""
        replace_text(self.file, experiment_text(setting, self.task, reasons={}))
        experiment = f"experiment={text_of(str(self.file))}"
        register_experiments([experiment])
        # Shape of the largest input at the spacing of the setting.
        shape = []
        lengths_mm = self.largest_mm[setting.stage]
        for length_mm, voxel_mm in zip(lengths_mm, setting.spacing_mm, strict=True):
            shape.append(math.ceil(length_mm / voxel_mm))
        arguments = [experiment, *self.arguments, f"validation_shape={text_of(shape)}"]
        if setting.stage is StageName.coarse:
            # This stage has no key for the size of its samples.
            arguments.append(f"shape={text_of(list(setting.patch_size))}")
        return to_config(hydra.compose("plan", arguments), PlanConfig)
