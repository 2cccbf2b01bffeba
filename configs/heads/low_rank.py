"""low_rank at micro size: an output matrix of rank 64, the product of two.

    headlab train --config=configs/heads/low_rank.py --workdir=runs/low_rank

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "low_rank"
    config.head.rank = 64
    return config
