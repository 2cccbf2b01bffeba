"""The rank laboratory: what a head can express, measured on matrices that need not fit into memory.

Arithmetic is in float64 on the host. Nothing here trains: `headlab.training` is never imported.
"""

from headlab.analysis.audits import (
    Audit,
    SelfRepetition,
    Variant,
    compare_heads_numerically,
    self_repetition,
)
from headlab.analysis.blocks import RowBlocks
from headlab.analysis.bottleneck import BottleneckGap, Fit, bottleneck_gap, fit_head
from headlab.analysis.geometry import (
    GradientShare,
    Similarity,
    anisotropy,
    gradient_share,
    head_gradient_share,
    output_rows,
    output_spectra,
    table_similarity,
)
from headlab.analysis.hull_programs import Certificate
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.ranks import Rank, rank
from headlab.analysis.reachability import Argmaxable, argmaxable
from headlab.analysis.run_rank import RunRank, rank_of_run
from headlab.analysis.spectra import Spectrum, spectrum
from headlab.analysis.states import HeldOut, held_out_states
from headlab.analysis.theorems import BoundCheck, Theory, check_bound, theory

__all__ = [
    "Argmaxable",
    "Audit",
    "BottleneckGap",
    "BoundCheck",
    "Certificate",
    "Fit",
    "GradientShare",
    "HeldOut",
    "Rank",
    "RowBlocks",
    "RunRank",
    "SelfRepetition",
    "Similarity",
    "Spectrum",
    "Theory",
    "Variant",
    "anisotropy",
    "argmaxable",
    "bottleneck_gap",
    "check_bound",
    "compare_heads_numerically",
    "fit_head",
    "gradient_share",
    "head_gradient_share",
    "held_out_states",
    "log_prob_matrix",
    "output_rows",
    "output_spectra",
    "rank",
    "rank_of_run",
    "self_repetition",
    "spectrum",
    "table_similarity",
    "theory",
]
