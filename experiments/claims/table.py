"""The table of claims in Markdown, and its place in a README."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.register import CLAIMS, Claim
from headlab import files
from headlab.errors import HeadlabError

BEGIN = "<!-- the table begins: written by --record -->"
END = "<!-- the table ends -->"
_HEADINGS = ("claim", "source", "command", "size", "rule", "found", "verdict")


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row a claim that was tested, in the register's order."""
    rows = [_row(claim, found[claim.name]) for claim in CLAIMS if claim.name in found]
    lines = [_HEADINGS, ["---"] * len(_HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(claim: Claim, one: Mapping[str, Any]) -> Sequence[str]:
    command = f"`python -m experiments.claims.run {claim.name}`"
    verdict = f"**{one['verdict']}**"
    return claim.says, claim.source, command, claim.size, claim.rule, one["found"], verdict


def put_into(readme: Path, table: str) -> None:
    """Replaces what stands between the two markers of a file; HeadlabError where they aren't there."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise HeadlabError(
            f"{readme} has no table to replace: the lines {BEGIN} and {END} are gone"
        )
    files.replace(readme, f"{before}{BEGIN}\n{table}{END}{after}".encode())
