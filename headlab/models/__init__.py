"""The small decoder that heads plug into."""

from headlab.models.decoder import Decoder, build, count_parameters, merge, resolve_head, split

__all__ = ["Decoder", "build", "count_parameters", "merge", "resolve_head", "split"]
