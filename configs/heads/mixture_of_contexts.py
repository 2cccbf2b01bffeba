"""mixture_of_contexts at micro size: one softmax of four mixed contexts (Yang et al. 2018).

    headlab train --config=configs/heads/mixture_of_contexts.py --workdir=runs/mixture_of_contexts

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "mixture_of_contexts"
    config.head.n_experts = 4
    return config
