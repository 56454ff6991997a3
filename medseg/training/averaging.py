"""Exponential moving average of a network's weights, which is less noisy than any one step."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Averages the weights that a network has after each optimiser step.

    After n steps the average is decay^(n-1) w_1 + (1 - decay) Σ decay^(n-k) w_k, k = 2 … n: it
    begins with the weights after the first step. Running statistics of norms are averaged too;
    counters are not.

    Args:
        network: Network in training.
        ema_decay: Share of the average that a step keeps, in (0, 1).
    """

    def __init__(self, network: nn.Module, ema_decay: float) -> None:
        self.network = network
        self._blend = get_ema_multi_avg_fn(ema_decay)
        self._values: dict[str, Tensor] = {}

    def update(self) -> None:
        """Add the weights as they are after a step."""
        weights = self._weights()
        if self._values:
            self._blend(list(self._on_device(weights).values()), list(weights.values()), 0)
        else:
            self._values = {name: weight.clone() for name, weight in weights.items()}

    def exchange(self) -> None:
        """Exchange the average and the network's weights; nothing happens before the first step."""
        weights = self._weights()
        for name, value in self._on_device(weights).items():
            weight = weights[name].clone()
            weights[name].copy_(value)
            value.copy_(weight)

    def values(self) -> dict[str, Tensor]:
        """Return the average by the network's names; empty before the first step."""
        return dict(self._values)

    def load(self, values: dict[str, Tensor]) -> None:
        """Take over the average of a checkpoint; what is not averaged may be among its values."""
        self._values = {name: values[name].clone() for name in self._weights()}

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: weight
            for name, weight in self.network.state_dict().items()
            if torch.is_floating_point(weight)
        }

    def _on_device(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The average on the devices of the weights, which may have moved since it was loaded."""
        self._values = {
            name: value.to(weights[name].device) for name, value in self._values.items()
        }
        return self._values
