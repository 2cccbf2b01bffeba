"""The small decoder that heads plug into."""

from headlab.models.decoder import (
    Decoder,
    body_flops_per_token,
    body_parameters,
    build,
    count_parameters,
    merge,
    resolve_head,
    split,
)

__all__ = [
    "Decoder",
    "body_flops_per_token",
    "body_parameters",
    "build",
    "count_parameters",
    "merge",
    "resolve_head",
    "split",
]
