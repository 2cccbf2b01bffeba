"""mixture_of_sigsoftmaxes at micro size: four sigsoftmaxes over one output matrix, mixed by a prior.

    headlab train --config=configs/heads/mixture_of_sigsoftmaxes.py --workdir=runs/mixture_of_sigsoftmaxes

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "mixture_of_sigsoftmaxes"
    config.head.n_experts = 4
    return config
