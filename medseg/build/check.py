"""Check of a run's objects before data is read: each is built once, the network without memory, the optimiser for one weight."""

import torch
from torch import nn

from medseg.build.extensions import check_loss, make_callbacks, make_loggers, make_metrics, make_transforms
from medseg.build.network import make_network
from medseg.build.optimisation import find_lr_factor, make_optimizer, make_schedule
from medseg.build.task import count_classes
from medseg.config.schema import TrainConfig
from medseg.config.targets import TARGET
from medseg.errors import UserError, first_line


def check_objects(config: TrainConfig) -> None:
    """Build the network on the meta device, the loss, and the optimiser and schedule of one weight, which then take a step.

    Raises:
        UserError: If one of them refuses its arguments.
    """
    with torch.device("meta"):
        make_network(config)
    check_loss(config)
    make_transforms(config)
    make_metrics(config.metrics, count_classes(config), config.trusted_targets)
    make_callbacks(config)
    make_loggers(config)
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    node = config.optimizer
    try:
        optimizer = make_optimizer(config.optimizer, lr_factor, config.trusted_targets)([weight])
        optimizer.step(lambda: 0.0)
        node = config.schedule
        make_schedule(config.schedule, lr_factor, config.warmup_steps, config.trusted_targets)(optimizer).step()
    except UserError:
        raise
    except Exception as error:  # of any class that the configuration names
        group = "optimizer" if node is config.optimizer else "schedule"
        raise UserError(
            f"{group}: {node[TARGET]} cannot be used with these arguments ({type(error).__name__}: {first_line(error)}); change them"
        ) from error
