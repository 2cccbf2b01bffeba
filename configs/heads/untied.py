"""untied at micro size: an output matrix of its own.

    headlab train --config=configs/heads/untied.py --workdir=runs/untied

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "untied"
    return config
