"""What is read off a model's distribution: scores of given text, choices among candidates, and text that goes on."""

from headlab.scoring.choices import Candidate, choose, choose_text
from headlab.scoring.decoding import generate, tokens_after
from headlab.scoring.rules import (
    Rules,
    greedy,
    sample,
    with_min_p,
    with_repetition_penalty,
    with_temperature,
    with_top_k,
    with_top_p,
)
from headlab.scoring.score import TokenScore, score
from headlab.scoring.text import Continuation, Piece, generate_text, stream_text
from headlab.scoring.windows import default_stride

__all__ = [
    "Candidate",
    "Continuation",
    "Piece",
    "Rules",
    "TokenScore",
    "choose",
    "choose_text",
    "default_stride",
    "generate",
    "generate_text",
    "greedy",
    "sample",
    "score",
    "stream_text",
    "tokens_after",
    "with_min_p",
    "with_repetition_penalty",
    "with_temperature",
    "with_top_k",
    "with_top_p",
]
