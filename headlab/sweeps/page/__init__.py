"""The results of runs as one HTML page that needs no network, to be sent to a colleague."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headlab.errors import HeadlabError
from headlab.sweeps.directories import Paths
from headlab.sweeps.page.content import read
from headlab.sweeps.page.document import document


def write_report(
    workdirs: Paths,
    output: str | os.PathLike[str],
    *,
    title: str | None = None,
    baseline: str | Mapping[str, Any] | None = None,
    metric: str | None = None,
) -> Path:
    """Writes the page of these runs, or of the runs in these directories, and returns its path.

    `baseline` and `metric` are those of `headlab.sweeps.comparison.compare`.

    Raises:
      UsageError: there are no runs, or they cannot be compared as asked.
      HeadlabError: the file could not be written.
    """
    page = document(read(workdirs, baseline=baseline, metric=metric), title)
    path = Path(output)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as problem:
        raise HeadlabError(f"{path} could not be written ({problem.strerror})") from problem
    return path


__all__ = ["write_report"]
