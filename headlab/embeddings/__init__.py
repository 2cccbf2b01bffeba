"""The input side of a language model: what a tied head ties to."""

from headlab.embeddings.table import Table, init_rows, padded_size

__all__ = ["Table", "init_rows", "padded_size"]
