"""What other commands left beside runs: spectra and samples. Whatever is not understood is named, not shown."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from headlab.sweeps.results import Run

_NAMES = ("singular_values", "spectrum", "values")
_MOST_VALUES = 400  # of one spectrum on the page


class Spectrum(NamedTuple):
    """Singular values, largest first, of one matrix of one run."""

    run: str
    name: str  # what else the file says of it, such as "log_probs"
    numbers: list[int]  # 1 is the largest; not all are kept of a long spectrum
    values: list[float]


def spectra(runs: Iterable[Run]) -> tuple[list[Spectrum], list[str]]:
    """(the spectra in the rank.json of each run, files that could not be read).

    A spectrum is a list of numbers under "singular_values", "spectrum" or "values", at any depth.
    """
    found: list[Spectrum] = []
    problems = []
    for run in runs:
        path = run.path / "rank.json"
        if not path.is_file():
            continue
        try:
            own = list(_lists(json.loads(path.read_text(encoding="utf-8")), ""))
        except (ValueError, OSError) as problem:
            problems.append(f"{path} could not be read: {problem}")
            continue
        if not own:
            problems.append(f"{path} holds no list of singular values")
        found += [Spectrum(run.name, name, *_thinned(values)) for name, values in own]
    return found, problems


def samples(folders: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """(samples in samples.json or results.json of the directories, files that could not be read).

    A sample has "prompt" and "text", and may have "head" and "temperature".
    """
    found: list[dict[str, Any]] = []
    problems = []
    for path in [folder / name for folder in folders for name in ("samples.json", "results.json")]:
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            listed = content.get("samples", []) if isinstance(content, dict) else content
            found += [_sample(sample) for sample in listed]
        except (ValueError, OSError, TypeError, KeyError, AttributeError) as problem:
            problems.append(f"{path} could not be read: {type(problem).__name__}: {problem}")
    return found, problems


def _sample(sample: Any) -> dict[str, Any]:
    temperature = sample.get("temperature")
    return {
        "head": str(sample.get("head", "")),
        "prompt": str(sample["prompt"]),
        "temperature": None if temperature is None else float(temperature),
        "text": str(sample["text"]),
    }


def _lists(tree: Any, name: str) -> Iterable[tuple[str, list[float]]]:
    if isinstance(tree, list):
        items: Any = ((str(number), inner) for number, inner in enumerate(tree, start=1))
    elif isinstance(tree, dict):
        items = tree.items()
    else:
        return
    for key, inner in items:
        if key in _NAMES and _is_spectrum(inner):
            label = str(tree.get("kind", "")) if isinstance(tree, dict) else ""
            yield " ".join(filter(None, (name, label))), sorted(map(float, inner), reverse=True)
        else:
            yield from _lists(inner, f"{name} {key}".strip())


def _is_spectrum(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x >= 0
            for x in value
        )
    )


def _thinned(values: list[float]) -> tuple[list[int], list[float]]:
    """(numbers, values): the first half of the limit, then equal strides, and the last."""
    numbers = list(range(1, len(values) + 1))
    if len(values) > _MOST_VALUES:
        first = _MOST_VALUES // 2
        stride = math.ceil((len(values) - first) / first)
        numbers = sorted({*numbers[:first], *numbers[first::stride], len(values)})
    return numbers, [float(f"{values[number - 1]:.5g}") for number in numbers]
