"""sigsoftmax at micro size: an untied matrix whose exponential is multiplied by a sigmoid (Kanai et al. 2018).

    headlab train --config=configs/heads/sigsoftmax.py --workdir=runs/sigsoftmax

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "sigsoftmax"
    return config
