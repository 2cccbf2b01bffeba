"""mixtape at micro size: four logits a token, mixed by gates before one softmax (Yang et al. 2019).

    headlab train --config=configs/heads/mixtape.py --workdir=runs/mixtape

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "mixtape"
    config.head.n_experts = 4
    config.head.frequent_share = 0.1  # tokens that have gates of their own
    return config
