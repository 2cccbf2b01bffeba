"""`headlab rank`."""

import argparse
import json

from headlab.cli.arguments import Command, Overrides, add_run, checkpoint, count, one_of, path
from headlab.cli.tables import print_table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, folders=True)
    parser.add_argument(
        "--contexts",
        type=count,
        default=2048,
        metavar="N",
        help="rows: the first N positions of the split; default: 2048",
    )
    parser.add_argument(
        "--split",
        **one_of("validation", "test"),
        default="validation",
        help="default: validation",
    )
    parser.add_argument(
        "--corpus",
        metavar="NAME",
        help="the text of a Hugging Face folder, such as text:GLOB; default: headlab_english",
    )
    parser.add_argument("--step", default="last", help="a checkpoint, last or best; default: last")
    parser.add_argument(
        "--sketch",
        type=count,
        metavar="K",
        help="a random sketch of width K, for wide vocabularies",
    )
    parser.add_argument(
        "--output",
        type=path,
        metavar="DIR",
        help="where rank.json and spectrum.png go; default: the run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    step = checkpoint(options.step)
    from headlab.analysis import run_rank

    found = run_rank.rank_of_run(
        options.workdir,
        options.contexts,
        split=options.split,
        step=step,
        corpus=options.corpus,
        sketch=options.sketch,
    )
    files = run_rank.write(found, options.output or options.workdir)
    if options.json:
        print(json.dumps(run_rank.as_dict(found), indent=1))
        return 0
    measured, known = found.rank, found.theory
    where = "" if found.step is None else f" at step {found.step:,}"
    print_table(
        f"{options.workdir}: {found.head} head{where}, log-probabilities of "
        f"{found.contexts:,} positions of the {found.split} split",
        [
            ("rank", f"{'at least ' if measured.at_least else ''}{measured.rank:,}"),
            ("theorem: at most", "no bound below V" if known.bound is None else f"{known.bound:,}"),
            ("V", f"{known.vocab_size:,}"),
            ("tolerance", f"{measured.tolerance:.3g}"),
            ("effective rank, entropy (Roy & Vetterli)", f"{measured.entropy_rank:.2f}"),
            ("stable rank", f"{measured.stable_rank:.4f}"),
            ("participation ratio", f"{measured.participation_ratio:.4f}"),
            *(
                (f"singular values that hold {share:.1%} of the energy", f"{needed:,}")
                for share, needed in measured.energy_ranks.items()
            ),
            (
                "largest gap, after singular value",
                f"{measured.gap_after:,} (×{measured.gap_ratio:.3g})"
                if measured.gap_after
                else "none",
            ),
            ("d_model that this gap implies", str(measured.hidden_size)),
        ],
    )
    print(f"theorem: {known.reason}")
    for caveat in measured.caveats:
        print(f"caveat: {caveat}")
    print(f"written to {files[0]} and {files[1]}")
    return 0


COMMAND = Command(
    name="rank",
    help="rank of a run's log-probabilities, beside its theorem",
    description="""
    The singular values and the rank of the log-probabilities that a run's head gives to held-out positions, computed in
    float64, beside the theorem on the head. Writes rank.json and spectrum.png.
    """,
    examples="""
    headlab rank --workdir=runs/tied
    headlab rank --workdir=runs/tied --contexts=4096 --output=rank/tied
    headlab rank --workdir=runs/wide --sketch=512 --json
    headlab rank --workdir=models/SmolLM2-135M --corpus='text:texts/*.txt' --output=rank/smollm
    """,
    add_arguments=_add_arguments,
    run=_run,
)
