"""adaptive at micro size: frequent tokens at full width, rare ones in narrower clusters (Grave et al. 2016).

    headlab train --config=configs/heads/adaptive.py --workdir=runs/adaptive

The recipe is that of configs/micro.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

MICRO = Path(__file__).parents[1] / "micro.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(MICRO))["get_config"]()
    config.head.name = "adaptive"
    config.head.cutoffs = "auto"  # from the token counts, by the paper's cost model
    config.head.div_value = 4.0
    return config
