"""The rank of a trained run's head on held-out text, with its theorem: what `headlab rank` prints and writes."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from headlab.analysis.blocks import RowBlocks, rows_at_once
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.plots import draw_spectra
from headlab.analysis.ranks import Rank, rank
from headlab.analysis.spectra import Spectrum, spectrum
from headlab.analysis.states import held_out_states
from headlab.analysis.theorems import Theory, theory
from headlab.data.progress import track
from headlab.errors import UsageError
from headlab.runs import environment


@dataclasses.dataclass(frozen=True)
class RunRank:
    """What was measured of which checkpoint, on which text."""

    head: str
    step: int | None  # None: of a Hugging Face folder
    split: str
    contexts: int
    spectrum: Spectrum
    rank: Rank
    theory: Theory


def rank_of_run(
    workdir: str | os.PathLike[str],
    contexts: int,
    *,
    split: str = "validation",
    step: int | Literal["last", "best"] = "last",
    corpus: str | None = None,
    sketch: int | None = None,
    progress: bool = True,
) -> RunRank:
    """The spectrum and rank of log P `[contexts, V]` of a run in float64, beside the theorem on its head.

    `workdir` may be a Hugging Face folder, too, and `corpus` then says on which text (see `held_out_states`).
    `progress` shows blocks of rows with the time left, where standard error is a terminal. Errors are those of
    `log_prob_matrix` and `spectrum`.
    """
    found = held_out_states(workdir, contexts, split=split, step=step, corpus=corpus)
    model = found.restored.model
    if sketch is not None and not 1 <= sketch <= model.head.vocab_size:
        raise UsageError(
            f"the sketch is {sketch} wide; it must be in 1 … {model.head.vocab_size}, the vocabulary's size"
        )
    matrix = log_prob_matrix(model.head, found.h, embedding=model.embedding)
    values = spectrum(_shown(matrix) if progress else matrix, sketch=sketch)
    return RunRank(
        found.restored.head,
        found.restored.step,
        split,
        contexts,
        values,
        rank(values),
        theory(model.head),
    )


def as_dict(found: RunRank) -> dict[str, Any]:
    """`found` as JSON holds it: rank and theory in full, "singular_values", and the versions it was measured with."""
    measured = dataclasses.asdict(found.rank)
    measured["energy_ranks"] = {str(share): k for share, k in found.rank.energy_ranks.items()}
    return {
        "head": found.head,
        "step": found.step,
        "split": found.split,
        "contexts": found.contexts,
        "kind": found.spectrum.kind,
        "rank": measured,
        "theory": dataclasses.asdict(found.theory),
        "singular_values": found.spectrum.singular_values.tolist(),
        "environment": environment(),
    }


def write(found: RunRank, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes rank.json and spectrum.png into the directory, made where it is missing; returns both paths.

    Raises UsageError where the directory is a file.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(
            f"{directory} is a file; choose a directory for rank.json and spectrum.png"
        ) from None
    record, picture = directory / "rank.json", directory / "spectrum.png"
    record.write_text(json.dumps(as_dict(found), indent=1, allow_nan=False) + "\n")
    figure = draw_spectra({found.head: found.spectrum}, {found.head: found.theory.bound})
    figure.savefig(picture, dpi=150)
    return record, picture


def _shown(matrix: RowBlocks) -> RowBlocks:
    total = -(-matrix.rows // min(rows_at_once(matrix.columns), matrix.rows))

    def blocks() -> Iterator[Any]:
        return track(matrix, "rank: blocks of rows", total=total)

    return dataclasses.replace(matrix, make=blocks)
