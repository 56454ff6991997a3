"""Planner of `configure`: predicts memory and time of a setting as `medseg plan` does."""

import functools
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
        shape, largest_shape = input_shape(config), evaluated_shape(config)
        prediction = estimate(config, shape, largest_shape, self.machine)
        seconds = prediction.seconds_per_step
        if setting.stage is StageName.coarse:
            # The peak is that of the largest scan, the mean step that of the median one.
            prediction_of_median = estimate(config, setting.patch_size, largest_shape, self.machine)
            seconds = prediction_of_median.seconds_per_step
        return Prediction(prediction.peak_resident / GIB, seconds)

    def _config(self, setting: Setting) -> PlanConfig:
        """Compose the configuration of a setting as `plan` would."""
        replace_text(self.file, experiment_text(setting, self.task, reasons={}))
        experiment = f"experiment={text_of(str(self.file))}"
        register_experiments([experiment])
        lengths_mm = self.largest_mm[setting.stage]
        arguments = [
            experiment,
            *self.arguments,
            f"extent_mm.{setting.stage.value}={text_of(list(lengths_mm))}",
        ]
        return to_config(hydra.compose("plan", arguments), PlanConfig)
