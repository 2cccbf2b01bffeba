"""The page: one file that needs nothing else, put together from its sections."""

import datetime
import importlib.resources
from collections.abc import Sequence
from typing import Any

from headlab import __version__
from headlab.sweeps.formats import difference_text, with_error
from headlab.sweeps.page import tables
from headlab.sweeps.page.content import Content
from headlab.sweeps.page.curves import FIRST_KEPT, is_thinned, points_per_run
from headlab.sweeps.page.markup import button, details, json_block, listing, plot, section, text
from headlab.sweeps.page.plots import plot_data

# nothing is fetched, whatever a run's name or sample says
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def document(content: Content, title: str | None) -> str:
    """The whole page as HTML."""
    from plotly.offline import get_plotlyjs

    title = title or _default_title(content)
    sections = [part for part in _sections(content) if part[2]]
    links = "".join(f'<li><a href="#{name}">{text(words)}</a></li>' for name, words, _ in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="headlab {text(__version__)}">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<div class="top"><h1>{text(title)}</h1>
<button type="button" id="theme">Dark theme</button></div>
{_lead(content)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
<noscript><p class="note">The tables are complete; plots, sorting and themes need JavaScript.</p></noscript>
{"".join(section(*part) for part in sections)}
</main>
<footer><p>Made by headlab {text(__version__)} on {datetime.date.today():%Y-%m-%d}. Losses are in nats a token.
This file needs no network.</p></footer>
{json_block("data", plot_data(content))}
<script type="text/plain" id="plotly">{get_plotlyjs()}</script>
<script>{_asset("page.js")}</script>
<script>{_asset("plots.js")}</script>
</body>
</html>
"""


def _sections(content: Content) -> list[tuple[str, str, str]]:
    """(id, title, content) of each section; without content it is left out."""
    return [
        ("results", "Results", _results(content)),
        ("curves", "Loss curves", _curves(content)),
        ("size", "Size and cost", _size(content)),
        ("frequency", "Loss by token frequency", _frequency(content)),
        ("spectra", "Spectra", _spectra(content)),
        ("samples", "Samples", _samples(content)),
        ("runs", "Runs", tables.runs_table(content) + tables.missing_table(content)),
        ("configuration", "Configuration", _configuration(content)),
        ("provenance", "Provenance", tables.provenance_table(content)),
    ]


def _lead(content: Content) -> str:
    states = content.frame["state"]
    finished, failed = int((states == "finished").sum()), int((states == "failed").sum())
    counts = [f"{finished} of {len(states)} runs finished", f"{failed} failed" if failed else ""]
    left_out, not_started = (len(content.frame.attrs[key]) for key in ("left_out", "not_started"))
    counts += [
        f"{left_out} left out" if left_out else "",
        f"{not_started} not begun" if not_started else "",
    ]
    parts = [f'<p class="question">{text(question)}</p>' for question in content.questions]
    parts += [f"<p>{text(_finding(content))}</p>" if content.rows else ""]
    parts += [f'<p class="counts">{text(" · ".join(filter(None, counts)))}</p>']
    parts += [
        f'<pre class="command" tabindex="0"><code>{text(c)}</code></pre>' for c in content.commands
    ]
    return "".join(parts)


def _finding(content: Content) -> str:
    """The best group in a sentence."""
    assert content.comparison is not None
    best, metric = content.rows[0], content.comparison.metric
    words = f"{metric.best.capitalize()} {metric.words}: {best.group.name}, "
    words += f"{with_error(best.mean, best.standard_error, metric.digits)} {metric.unit} over {_count(best.n, 'seed')}"
    if best.difference is not None:
        return (
            f"{words}; {difference_text(best, metric.digits)} against {best.difference.baseline}."
        )
    return f"{words}."


def _results(content: Content) -> str:
    table = tables.results_table(content)
    parts = [listing(content.notes, "notes"), table]
    if any(row.difference is not None for row in content.rows):
        label = "Differences to the baseline by group, with 95% intervals; the values are in the table above"
        caption = (
            "Difference to the baseline, paired by seed: the mean with its 95% interval (Student's t), and each pair "
            "of seeds as a small point. Each interval is right by itself; of many, some miss by chance."
        )
        parts.append(plot("differences", label, caption))
    return "".join(parts)


def _curves(content: Content) -> str:
    limit = points_per_run(len(content.runs))
    thinned = ""
    if is_thinned(content.runs, limit):
        thinned = (
            f" Training curves have at most {limit:,} points here: the first {min(FIRST_KEPT, limit // 3)}, then the "
            "lowest and the highest of equal stretches; metrics.jsonl has all."
        )
    controls = button("log-x", "Log steps") + button("log-y", "Log loss")
    controls += button("no-training", "Held-out only") + button("zoom-end", "Second half")
    label = (
        f"Training and held-out loss by step of {_count(len(content.runs), 'run')}; a table follows"
    )
    caption = (
        "Nats a token. Thin and light: training; thick, with markers: held-out. Tied heads are blue, untied ones red."
        f"{thinned} Values are rounded to 4 decimals. Drag to zoom, double-click to see all."
    )
    toggles = (
        '<div class="legend" id="legend" role="group" aria-label="Runs shown in the plot"></div>'
    )
    table = details("Held-out loss as a table", tables.held_out_table(content))
    return toggles + plot("curves", label, caption, controls) + table


def _size(content: Content) -> str:
    if not content.rows:
        return ""
    assert content.comparison is not None
    metric = content.comparison.metric
    bars = plot(
        "parameters",
        "Parameters of each group by part: embedding, body and head; the values are in the table of results",
        "Parameters by part, without padding. A tied head has none of its own beside what it adds to the table.",
    )
    controls = button("x-parameters", "Parameters", True) + button("x-flops", "Training FLOPs")
    controls += button("x-rank", "Rank bound") + button("size-log", "Log axis", True)
    caption = (
        "Means with standard errors. FLOPs: three times the forward pass, over all tokens seen; for an adaptive head, "
        "of tokens as frequent as Zipf's law has them. Hollow: no rank below V is promised, so the group stands at V."
    )
    label = f"{metric.words.capitalize()} against the size of the model; the values are in the table of results"
    return bars + plot("size", label, caption, controls)


def _frequency(content: Content) -> str:
    if not content.rows:
        return ""
    paired = any(row.difference is not None for row in content.rows)
    controls = button("band-loss", "Loss", True) + button(
        "band-difference", "Difference to baseline"
    )
    caption = (
        "Held-out loss by how often the target token occurs in training: tenths of the vocabulary, the most frequent "
        "ids first. Differences are paired by seed, with 95% intervals. A band without tokens has no point."
    )
    label = "Held-out loss by frequency of the target token; a table follows"
    drawn = plot("bands", label, caption, controls if paired else "")
    return drawn + details("Loss by frequency as a table", tables.bands_table(content))


def _spectra(content: Content) -> str:
    if not content.spectra:
        return ""
    label = "Singular values by their number on logarithmic axes; a table follows"
    caption = "Singular values, the largest first, as rank.json of each run has them."
    table = details("Singular values as a table", tables.spectra_table(content))
    return plot("spectra", label, caption) + table


def _samples(content: Content) -> str:
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in content.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    return "".join(_prompt(prompt, found) for prompt, found in by_prompt.items())


def _prompt(prompt: str, found: Sequence[dict[str, Any]]) -> str:
    items = []
    for sample in found:
        hot = sample["temperature"]
        rule = "" if hot is None else f"temperature {hot:g}" if hot else "greedy"
        source = ", ".join(filter(None, (sample["head"], rule)))
        items.append(f"<dt>{text(source)}</dt><dd>{text(sample['text'].strip())}</dd>")
    return f"<h3>{text(prompt)} …</h3><dl>{''.join(items)}</dl>"


def _configuration(content: Content) -> str:
    return details("Every option, what differs marked", tables.config_table(content))


def _default_title(content: Content) -> str:
    heads = list(dict.fromkeys(content.frame["head"]))
    shown = (
        ", ".join(heads) if len(heads) <= 4 else f"{', '.join(heads[:3])} and {len(heads) - 3} more"
    )
    return f"Output heads: {shown}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
