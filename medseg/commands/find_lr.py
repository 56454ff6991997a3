"""The `find_lr` command: finds a learning rate in one short run of rising rates, and plots it."""

from dataclasses import replace
from pathlib import Path

import torch

from medseg.config.schema import FindLrConfig
from medseg.console import say
from medseg.data.spacing import find_spacing
from medseg.errors import EXIT_FAILED, require
from medseg.io.atomic import check_writable
from medseg.io.tables import write_csv
from medseg.report.plots import draw_lr_range
from medseg.training.assemble import make_data_module, make_module, make_trainer
from medseg.training.lr_range import LrRange, smoothed, suggest_lr
from medseg.training.network import load_initial_weights, make_network
from medseg.training.optimisation import find_lr_factor

CONSTANT = {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}


def find_lr(config: FindLrConfig) -> int:
    """Train for `steps` while the rate climbs; write `find_lr.csv` and `find_lr.png`, and print the argument of `train`.

    Returns:
        0, or 1 where the loss never falls.

    Raises:
        UserError: If the rates do not rise, or several ranks are asked for.
    """
    require(
        config.lowest_lr < config.highest_lr,
        f"expected lowest_lr < highest_lr, but got lowest_lr={config.lowest_lr:g} and highest_lr={config.highest_lr:g}",
    )
    require(
        config.trainer.devices * config.trainer.num_nodes == 1,
        "trainer: find_lr runs on one rank, and its result holds for any number of ranks with the same stage.batch_size; choose trainer=single",
    )
    find_spacing(config.spacing, config.data, config.task)
    output = Path(config.output)
    check_writable(output)
    # The test sets the rates itself, and leaves nothing behind but its result.
    config = replace(config, schedule=CONSTANT, warmup_steps=0, logger={}, run_dir=str(output))
    torch.manual_seed(config.seed)
    network = make_network(config)
    load_initial_weights(network, config)
    lr_range = LrRange(config.lowest_lr, config.highest_lr, config.steps)
    trainer = make_trainer(config, [lr_range])
    trainer.limit_val_batches = 0
    trainer.fit(make_module(config, network, {}), datamodule=make_data_module(config))

    lrs, losses = lr_range.lrs, lr_range.losses
    write_csv(
        output / "find_lr.csv",
        [{"lr": lr, "loss": loss} for lr, loss in zip(lrs, losses, strict=True)],
        ("lr", "loss"),
    )
    found = suggest_lr(lrs, losses)
    if losses:
        optimizer = str(config.optimizer["_target_"]).rpartition(".")[2]
        title = (
            f"{config.stage.name.value}, {optimizer}, stage.batch_size={config.stage.batch_size}"
        )
        draw_lr_range(lrs, losses, smoothed(losses).tolist(), found, title, output / "find_lr.png")
    if found is None:
        say("the loss never falls; try a lower lowest_lr or more steps")
        return EXIT_FAILED
    lowest = lrs[int(smoothed(losses).argmin())]
    say(
        f"suggested: {found:.2g}, where the loss falls steepest but at most a tenth of {lowest:.2g}, the rate of the lowest loss"
    )
    # `lr_scaling` multiplies the rate that is given.
    print(f"optimizer.lr={found / find_lr_factor(config.lr_scaling, config.stage.batch_size):.2g}")
    print(f"{output / 'find_lr.csv'}, {output / 'find_lr.png'}")
    return 0
