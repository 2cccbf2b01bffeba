"""Held-out loss of a run that was trained before."""

from typing import Any

from headlab import data, models, sharding
from headlab.errors import UsageError
from headlab.runs import RunDirectory, restore_model
from headlab.training.evaluation import Evaluator


def evaluate_run(
    workdir: str, *, split: str = "validation", batch_size: int | None = None
) -> dict[str, Any]:
    """`Evaluator`'s figures for the latest checkpoint of a run, with "split", "step" and "head".

    `batch_size` None is the run's own. Raises UsageError where there is no run, no checkpoint, no such split, or where
    the corpus is not the one that the run was trained on.
    """
    if split not in data.SPLITS:
        raise UsageError(f"split is {split!r}; it must be one of {', '.join(data.SPLITS)}.")
    run = RunDirectory(workdir)
    config = run.config()
    size = config.eval.batch_size if batch_size is None else batch_size
    if size < 1 or size % config.mesh.data:
        raise UsageError(
            f"the evaluation batch is {size}; it must be a positive multiple of mesh.data={config.mesh.data}."
        )
    restored = restore_model(run)
    dataset = data.open_dataset(config.data)
    if dataset.tokenizer.fingerprint != restored.tokenizer.fingerprint:
        raise UsageError(
            f"the tokenizer of {config.data.corpus} is not the one that {workdir} was trained with: the corpus or the "
            "tokenizer file has changed since. Evaluate with the original one."
        )
    mesh = sharding.make_mesh(config.mesh.data)
    graph, *variables = models.split(restored.model)
    params, constants = sharding.place(tuple(variables), mesh, sharding.REPLICATED)
    evaluator = Evaluator(graph, dataset.store, mesh, seq_len=config.data.seq_len, batch_size=size)
    return {
        "split": split,
        "step": restored.step,
        "head": restored.head,
        **evaluator((params, constants), split),
    }
