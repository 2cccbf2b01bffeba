"""Held-out loss of a run that was trained before."""

from typing import Any

from headlab import data, models, sharding
from headlab.errors import UsageError
from headlab.ops.shards import VOCAB
from headlab.runs import RunDirectory, dataset_of, restore_model
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
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.vocab)
    devices = mesh.shape[sharding.DATA]
    if size < 1 or size % devices:
        raise UsageError(
            f"the evaluation batch is {size}; it must be a positive multiple of mesh.data={devices}."
        )
    restored = restore_model(run, shards=mesh.shape[VOCAB])
    dataset = dataset_of(run, restored)
    graph, params, constants = models.split(restored.model)
    specs = sharding.param_specs(params, mesh, fsdp=config.mesh.fsdp)
    params = sharding.place(params, mesh, specs)
    constants = sharding.place(constants, mesh, sharding.REPLICATED)
    evaluator = Evaluator(
        graph, dataset.store, mesh, specs, seq_len=config.data.seq_len, batch_size=size
    )
    return {
        "split": split,
        "step": restored.step,
        "head": restored.head,
        **evaluator((params, constants), split),
    }
