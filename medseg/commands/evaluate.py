"""The `evaluate` command: scores label maps against references."""

from pathlib import Path

from medseg.config.schema import EvaluateConfig
from medseg.data.reference import file_values
from medseg.errors import EXIT_FAILED
from medseg.evaluation.scoring import evaluate_folder
from medseg.task_options import make_task

# Classes that further metrics see: the background, and the region that is scored.
NUM_CLASSES = 2


def evaluate(config: EvaluateConfig) -> int:
    """Score the label maps of a folder.

    Returns:
        0, or 1 when a case could not be scored.
    """
    metrics = {}
    if config.metrics:
        # Imported here, since it loads torch, which the metrics of medseg itself do not need.
        from medseg.training.extensions import make_metrics

        metrics = make_metrics(config.metrics, NUM_CLASSES, config.trusted_targets)
    baseline = None
    if config.baseline:
        baseline = Path(config.baseline)
    summary = evaluate_folder(
        pred_dir=Path(config.pred),
        ref=Path(config.ref),
        output=Path(config.output),
        task=make_task(config.task),
        label_values=file_values(config.data.label_values or {}),
        labels_column=config.data.labels_column,
        split=config.split,
        pictures=config.pictures,
        metrics=metrics,
        num_pictures=config.num_pictures,
        num_viewers=config.num_viewers,
        baseline=baseline,
    )
    return EXIT_FAILED if summary.failed else 0
