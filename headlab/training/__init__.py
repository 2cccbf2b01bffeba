"""Training: optimizer, step, loop, held-out evaluation, checkpoints and metric writers."""

from headlab.training.evaluate import evaluate_run
from headlab.training.evaluation import Evaluator, frequency_bands
from headlab.training.loop import train, train_stacked
from headlab.training.stopping import Interrupted

__all__ = ["Evaluator", "Interrupted", "evaluate_run", "frequency_bands", "train", "train_stacked"]
