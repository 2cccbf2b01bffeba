"""What a sweep leaves, to be compared with what another left."""

from pathlib import Path
from typing import Any

from headlab.runs import RunDirectory
from headlab.sweeps import Plan


def table(plan: Plan, workdir: Path) -> dict[str, Any]:
    """The metrics and the result of each point's run, timings aside."""
    found = {}
    for point in plan.points:
        run = RunDirectory(workdir / point.name)
        records = [
            {k: v for k, v in record.items() if not k.startswith("timing/")}
            for record in run.metrics()
        ]
        result = run.result()
        found[point.name] = records, result["validation"], result["test"], result["best"]
    return found
