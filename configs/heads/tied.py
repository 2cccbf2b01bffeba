"""tied at micro size: the output matrix is the input embedding.

    headlab train --config=configs/heads/tied.py --workdir=runs/tied

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "tied"
    return config
