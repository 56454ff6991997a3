"""Jobs of `learning_curves.py` in nnU-Net's environment: plan, time, train and predict on a CPU.

    python benchmarks/learning_curves_nnunet.py plan|time|train|predict <job.json>

The environment variables of nnU-Net name the folders. Planner, trainer, augmentation and predictor
are nnU-Net's own. A job sets only the planner's memory, the number of training and validation
iterations and epochs, and the threads. Nothing of medseg is imported. The results of a job, its
facts, are written as JSON to the file that the job names as `facts`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]
Facts = dict[str, Any]

DATASET_ID = 1  # the number in `learning_curves_data.DATASET`
PLANS = "nnUNetPlans"
FOLD = 0
# At least `LEAST_TIMED` iterations are timed, and more until they have taken `TIMED_S` CPU seconds.
TIMED_S = 20.0
LEAST_TIMED = 2


def nnunet_folder(name: str) -> Path:
    """Read the folder `preprocessed` or `results` from nnU-Net's environment variable."""
    return Path(os.environ[f"nnUNet_{name}"])


def plan(job: Job) -> Facts:
    """Extract the fingerprint, plan and preprocess one configuration.

    Args:
        job: `dataset`, `configuration`, and `gpu_memory_target` in GB; None = nnU-Net's default.

    Returns:
        `spacing` in mm and `patch_size` in voxels, both (z, y, x), and `batch_size`.
    """
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    # One process, so that CPU seconds do not depend on the number of cores.
    extract_fingerprints([DATASET_ID], num_processes=1, show_progress_bar=False)
    plan_experiments([DATASET_ID], gpu_memory_target_in_gb=job["gpu_memory_target"])
    plans_file = nnunet_folder("preprocessed") / job["dataset"] / f"{PLANS}.json"
    configurations = json.loads(plans_file.read_text(encoding="utf-8"))["configurations"]
    name = job["configuration"]
    if name not in configurations:
        sys.exit(f"nnU-Net plans no {name} for these cases, but {', '.join(configurations)}")
    num_processes_per_configuration = [1]
    preprocess(
        [DATASET_ID], PLANS, [name], num_processes_per_configuration, show_progress_bar=False
    )
    configuration = configurations[name]
    return {key: configuration[key] for key in ("spacing", "patch_size", "batch_size")}


def time_training(job: Job) -> Facts:
    """Take some iterations of a training and time its parts.

    Args:
        job: See `make_trainer`.

    Returns:
        CPU seconds: `start_s` until the first iteration, `iteration_s` with the augmentation of
        its batch, `validation_s` of one iteration of the validation, and `epoch_s` of the end of
        an epoch, which saves a checkpoint and draws a plot.
    """
    # Without workers this process makes the batches, so its CPU seconds include them.
    os.environ["nnUNet_n_proc_DA"] = "0"  # noqa: SIM112
    trainer = make_trainer(job)
    # As many epochs as run below.
    trainer.num_epochs = 1
    trainer.on_train_start()
    # All CPU seconds of this process so far: imports, data and network.
    start_s = time.process_time()
    # The calls have the same order as in the loop of nnUNetTrainer.run_training.
    trainer.on_epoch_start()
    trainer.on_train_epoch_start()
    # The first iteration allocates memory, and is not timed.
    outputs = [trainer.train_step(next(trainer.dataloader_train))]
    iterations_start = time.process_time()
    num_timed = 0
    while num_timed < LEAST_TIMED or time.process_time() - iterations_start < TIMED_S:
        outputs.append(trainer.train_step(next(trainer.dataloader_train)))
        num_timed += 1
    iteration_s = (time.process_time() - iterations_start) / num_timed
    trainer.on_train_epoch_end(outputs)
    with torch.no_grad():
        trainer.on_validation_epoch_start()
        validation_start = time.process_time()
        val_outputs = [trainer.validation_step(next(trainer.dataloader_val))]
        epoch_end_start = time.process_time()
        trainer.on_validation_epoch_end(val_outputs)
    trainer.on_epoch_end()
    return {
        "start_s": start_s,
        "iteration_s": iteration_s,
        "validation_s": epoch_end_start - validation_start,
        "epoch_s": time.process_time() - epoch_end_start,
    }


def train(job: Job) -> Facts:
    """Train with the numbers of epochs and iterations of the job.

    The learning rate falls over `num_epochs`, so a shorter training has its whole schedule.

    Args:
        job: Keys of `make_trainer`; `epochs`; `iterations` and `validations`, the numbers of
            training and validation iterations of an epoch.

    Returns:
        `iterations`, the number of training iterations of all epochs.
    """
    trainer = make_trainer(job)
    trainer.num_epochs = job["epochs"]
    trainer.num_iterations_per_epoch = job["iterations"]
    trainer.num_val_iterations_per_epoch = job["validations"]
    trainer.run_training()
    return {"iterations": job["epochs"] * job["iterations"]}


def make_trainer(job: Job) -> Any:
    """Make the trainer of a job as `nnUNetv2_train -device cpu` does.

    Args:
        job: `dataset`, `configuration` and `trainer`, a name in nnU-Net's registry.
    """
    from nnunetv2.run.run_training import get_trainer_from_args

    return get_trainer_from_args(
        job["dataset"],
        job["configuration"],
        FOLD,
        job["trainer"],
        PLANS,
        device=torch.device("cpu"),
    )


def predict(job: Job) -> Facts:
    """Predict scans with the last checkpoint and the defaults of `nnUNetv2_predict`.

    Args:
        job: `dataset`, `configuration` and `trainer`; `scans`, a list of the channels' files for
            each scan; `output`, a folder that receives a label map of each scan.

    Returns:
        No facts.
    """
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    model = f"{job['trainer']}__{PLANS}__{job['configuration']}"
    folder = nnunet_folder("results") / job["dataset"] / model
    predictor.initialize_from_trained_model_folder(str(folder), (FOLD,), "checkpoint_final.pth")
    Path(job["output"]).mkdir(parents=True, exist_ok=True)
    predictor.predict_from_files_sequential(job["scans"], job["output"])
    return {}


JOBS = {"plan": plan, "time": time_training, "train": train, "predict": predict}


def main() -> None:
    """Run a job."""
    name, path = sys.argv[1:]
    job: Job = json.loads(Path(path).read_text(encoding="utf-8"))
    # Torch's default is one thread per core.
    torch.set_num_threads(job["threads"])
    facts = JOBS[name](job)
    Path(job["facts"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
