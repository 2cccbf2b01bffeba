"""Which runs can be stacked: trained as one program that `jax.vmap` maps over them."""

from collections.abc import Sequence
from typing import Any

from headlab import config as configs
from headlab import heads
from headlab.errors import UsageError
from headlab.training.checkpoints import Checkpoints

#: the options in which stacked runs may differ
STACKED_KEYS = ("seed", "optimizer.peak_rate")


def why_not(config: Any) -> str | None:
    """Why runs of this config cannot be stacked, or None where they can."""
    head, mesh = config.head, config.mesh
    names = {head.name} | ({"untied"} if head.untie_at is not None else set())
    for name in sorted(names):
        reason = heads.get(name).stacking_refused
        if reason is not None:
            return f"head.name={name}: {reason}"
    if (mesh.data, mesh.vocab) != (1, 1):
        return f"mesh.data={mesh.data} and mesh.vocab={mesh.vocab}: stacked runs share one device; set both to 1"
    if head.sum_order != "fast":
        return f"head.sum_order={head.sum_order}: it promises bits that stacked runs do not keep; set fast"
    if config.checkpoint.keep < 2:
        return (
            f"checkpoint.keep={config.checkpoint.keep}: a kill while the runs are being saved would leave no step that "
            "all of them have; set at least 2"
        )
    return None


def check_stack(stack: Sequence[Any]) -> None:
    """Raises UsageError where runs of these resolved configs cannot be stacked, with the reason."""
    for config in stack:
        reason = why_not(config)
        if reason is not None:
            raise UsageError(f"these runs cannot be stacked: {reason}, or train them one by one")
    first = configs.flatten(stack[0])
    for config in stack[1:]:
        other = configs.flatten(config)
        differing = [key for key in sorted(first | other) if first.get(key) != other.get(key)]
        wrong = [key for key in differing if key not in STACKED_KEYS]
        if wrong:
            raise UsageError(
                f"these runs cannot be stacked: they differ in {', '.join(wrong)}, and only "
                f"{' and '.join(STACKED_KEYS)} may differ; train them one by one"
            )


def last_common_step(every: Sequence[Checkpoints]) -> int:
    """The last step that all have saved, 0 for none; later checkpoints of some are removed."""
    common = set.intersection(*(set(checkpoints.all_steps()) for checkpoints in every))
    step = max(common, default=0)
    for checkpoints in every:
        checkpoints.forget_after(step)
    return step
