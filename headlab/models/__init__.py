"""The small decoder that heads plug into."""

from headlab.models.budget import Budget, body_flops_per_token, budget
from headlab.models.decoder import Decoder, build, count_parameters, merge, resolve_head, split

__all__ = [
    "Budget",
    "Decoder",
    "body_flops_per_token",
    "budget",
    "build",
    "count_parameters",
    "merge",
    "resolve_head",
    "split",
]
