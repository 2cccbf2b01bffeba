"""What accelerators can do at most, from their vendors' data sheets: dense bfloat16, without sparsity."""

from typing import NamedTuple

from headlab.errors import UsageError, nearest


class Chip(NamedTuple):
    """One device."""

    name: str
    flops: float  # dense bfloat16 operations a second
    bandwidth: float  # bytes a second from its main memory
    memory: float  # bytes of its main memory
    device_kinds: tuple[str, ...]  # as `jax.Device.device_kind` says it


CHIPS = {
    "a100": Chip("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 80e9, ("NVIDIA A100-SXM4-80GB",)),
    "a100-40gb": Chip("NVIDIA A100 SXM 40 GB", 312e12, 1.555e12, 40e9, ("NVIDIA A100-SXM4-40GB",)),
    "h100": Chip("NVIDIA H100 SXM", 989e12, 3.35e12, 80e9, ("NVIDIA H100 80GB HBM3",)),
    "h200": Chip("NVIDIA H200 SXM", 989e12, 4.8e12, 141e9, ("NVIDIA H200",)),
    "l4": Chip("NVIDIA L4", 121e12, 300e9, 24e9, ("NVIDIA L4",)),
    "l40s": Chip("NVIDIA L40S", 362e12, 864e9, 48e9, ("NVIDIA L40S",)),
    "tpu-v4": Chip("TPU v4", 275e12, 1.228e12, 32e9, ("TPU v4",)),
    "tpu-v5e": Chip("TPU v5e", 197e12, 819e9, 16e9, ("TPU v5 lite", "TPU v5e")),
    "tpu-v5p": Chip("TPU v5p", 459e12, 2.765e12, 95e9, ("TPU v5p",)),
    "tpu-v6e": Chip("TPU v6e", 918e12, 1.64e12, 32e9, ("TPU v6 lite", "TPU v6e")),
}


def chip(name: str) -> Chip:
    """The chip of that name; UsageError, with the nearest, where there is none.

    >>> chip("h100").flops / chip("h100").bandwidth  # operations a byte at which both take as long
    295.2238805970149
    """
    if name not in CHIPS:
        raise UsageError(
            f"no chip {name!r}; did you mean {nearest(name, CHIPS)}? (there are {', '.join(CHIPS)})"
        )
    return CHIPS[name]


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 operations a second of one device, or None where it is not known (every CPU).

    >>> peak_flops("TPU v4"), peak_flops("cpu")
    (275000000000000.0, None)
    """
    for known in CHIPS.values():
        if device_kind in known.device_kinds:
            return known.flops
    return None
