"""The `find_lr` command: suggests a learning rate after one short run of rising rates."""

from dataclasses import replace
from pathlib import Path

import torch

from medseg.config.schema import FindLrConfig
from medseg.console import say
from medseg.data.spacing import find_spacing
from medseg.errors import EXIT_FAILED, UserError
from medseg.io.atomic import check_writable
from medseg.io.tables import write_csv
from medseg.memory.device import use_supported_half
from medseg.report.plots import draw_lr_range
from medseg.targets import TARGET
from medseg.training.assemble import make_data_module, make_module, make_trainer
from medseg.training.lr_range import LrRange, smoothed, suggest_lr
from medseg.training.network import load_initial_weights, make_network
from medseg.training.optimisation import find_lr_factor

CONSTANT_SCHEDULE = {TARGET: "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}


def find_lr(config: FindLrConfig) -> int:
    """Train for `steps` with rising rates, and print the argument of `train` for the best rate.

    The losses are written to `find_lr.csv` and `find_lr.png`.

    Returns:
        0, or 1 where there is no rate to suggest: the first loss is not finite, or the loss does
        not fall for at least two steps.

    Raises:
        UserError: If the rates do not rise, or several ranks are asked for.
    """
    if config.lowest_lr >= config.highest_lr:
        raise UserError(
            f"expected lowest_lr < highest_lr, but got lowest_lr={config.lowest_lr:g} "
            f"and highest_lr={config.highest_lr:g}"
        )
    if config.trainer.num_ranks != 1:
        raise UserError(
            "trainer: find_lr runs on one rank, and its result holds for any number of ranks "
            "with the same stage.batch_size; choose trainer=single"
        )
    # Fills in a spacing that depends on the cases.
    find_spacing(config.spacing, config.data, config.task)
    output = Path(config.output)
    check_writable(output)
    lr_range = _train_with_rising_lr(config, output)
    lrs, losses = lr_range.lrs, lr_range.losses
    if not losses:
        say(
            "the loss of the first step is NaN or infinite, which no learning rate has caused; "
            "debug=anomaly names the operation, memory.precision=fp32 excludes overflows"
        )
        return EXIT_FAILED
    rows = [{"lr": lr, "loss": loss} for lr, loss in zip(lrs, losses, strict=True)]
    write_csv(output / "find_lr.csv", rows, ("lr", "loss"))
    suggested_lr = suggest_lr(lrs, losses)
    _draw(config, lr_range, suggested_lr, output / "find_lr.png")
    lowest_index = int(smoothed(losses).argmin())
    if suggested_lr is None:
        fault = "the loss never falls"
        if lowest_index == 1:
            fault = "the loss falls from the first step to the second only"
        say(f"{fault}; try a lower lowest_lr or more steps")
        return EXIT_FAILED
    lr_of_lowest_loss = lrs[lowest_index]
    say(
        f"suggested: {suggested_lr:.2g}, where the loss falls steepest "
        f"but at most a tenth of {lr_of_lowest_loss:.2g}, the rate of the lowest loss"
    )
    # `train` multiplies `optimizer.lr` by this factor of `lr_scaling`.
    factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    print(f"optimizer.lr={suggested_lr / factor:.2g}")
    print(f"{output / 'find_lr.csv'}, {output / 'find_lr.png'}")
    return 0


def _train_with_rising_lr(config: FindLrConfig, output: Path) -> LrRange:
    """Train for `config.steps` steps at most; returns the rate and the loss of each step.

    Args:
        config: Configuration of the command.
        output: Folder of the result. The trainer writes its files, such as those of a profiler,
            there too, since this training has no run folder.
    """
    # `LrRange` sets the rates, so the schedule must not change them. Nothing is logged.
    config = replace(
        config, schedule=CONSTANT_SCHEDULE, warmup_steps=0, logger={}, run_dir=str(output)
    )
    use_supported_half(config.memory, config.trainer.accelerator)
    torch.manual_seed(config.seed)
    network = make_network(config)
    load_initial_weights(network, config)
    lr_range = LrRange(config.lowest_lr, config.highest_lr, config.steps)
    trainer = make_trainer(config, [lr_range])
    trainer.limit_val_batches = 0  # no validation
    module = make_module(config, network, metadata={})  # no checkpoint is written
    trainer.fit(module, datamodule=make_data_module(config))
    return lr_range


def _draw(config: FindLrConfig, lr_range: LrRange, suggested_lr: float | None, path: Path) -> None:
    """Plot the losses over the rates, with the suggested rate."""
    optimizer = str(config.optimizer[TARGET]).rpartition(".")[2]
    title = f"{config.stage.name.value}, {optimizer}, stage.batch_size={config.stage.batch_size}"
    smooth_losses = smoothed(lr_range.losses).tolist()
    draw_lr_range(lr_range.lrs, lr_range.losses, smooth_losses, suggested_lr, title, path)
