"""What is read off a model's distribution: scores of given text, choices among candidates, and text that goes on."""

from headlab.pretrained import (
    OpenModel,
    PretrainedHead,
    load_head,
    open_model,
)
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
from headlab.scoring.score import TokenScore, score, total_log_prob
from headlab.scoring.text import Continuation, Piece, generate_text, stream_text
from headlab.scoring.windows import default_stride

__all__ = [
    "Candidate",
    "Continuation",
    "OpenModel",
    "Piece",
    "PretrainedHead",
    "Rules",
    "TokenScore",
    "choose",
    "choose_text",
    "default_stride",
    "generate",
    "generate_text",
    "greedy",
    "load_head",
    "open_model",
    "sample",
    "score",
    "stream_text",
    "tokens_after",
    "total_log_prob",
    "with_min_p",
    "with_repetition_penalty",
    "with_temperature",
    "with_top_k",
    "with_top_p",
]
