"""The input side of a language model: what a tied head ties to."""

from headlab.embeddings.base import Constant, Embedding
from headlab.embeddings.factorised import Factorised
from headlab.embeddings.table import Table, init_rows, known_rows, padded_size

__all__ = ["Constant", "Embedding", "Factorised", "Table", "init_rows", "known_rows", "padded_size"]
