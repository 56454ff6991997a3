"""Exponential moving average of a network's weights, which is less noisy than any one step."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Averages the weights that a network has after each optimiser step.

    After the first step the average is the weights w_1; each later step k makes it
    decay · average + (1 - decay) · w_k. Running statistics of norms are averaged too; integer
    counters are not.

    Args:
        network: Network in training.
        ema_decay: Share of the average that a step keeps, in (0, 1).
    """

    def __init__(self, network: nn.Module, ema_decay: float) -> None:
        self.network = network
        # Called with averages and weights, changes the averages; ignores its third argument.
        self._blend = get_ema_multi_avg_fn(ema_decay)
        self._values: dict[str, Tensor] = {}  # the average, by the network's names

    def update(self) -> None:
        """Update the average with the weights after a step."""
        weights = self._weights()
        if not self._values:
            self._values = {name: weight.clone() for name, weight in weights.items()}
            return
        averages = self._moved_to_weights(weights)
        # Both dictionaries have the order of the network's state.
        self._blend(list(averages.values()), list(weights.values()), 0)

    def exchange(self) -> None:
        """Exchange the average and the network's weights; nothing happens before the first step."""
        weights = self._weights()
        for name, average in self._moved_to_weights(weights).items():
            weight = weights[name].clone()
            weights[name].copy_(average)
            average.copy_(weight)

    def values(self) -> dict[str, Tensor]:
        """Return the average by the network's names; empty before the first step."""
        return dict(self._values)

    def load(self, values: dict[str, Tensor]) -> None:
        """Load the average from the weights of a checkpoint, without its counters."""
        self._values = {name: values[name].clone() for name in self._weights()}

    def _weights(self) -> dict[str, Tensor]:
        """List what is averaged: floating-point tensors of the network, not copies of them."""
        weights = {}
        for name, value in self.network.state_dict().items():
            if torch.is_floating_point(value):
                weights[name] = value
        return weights

    def _moved_to_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the average to the devices of the weights, and return it.

        The weights may have moved since the average was loaded.
        """
        for name, average in self._values.items():
            self._values[name] = average.to(weights[name].device)
        return self._values
