"""llama_tiny: a small Llama (rotary, RMSNorm, SwiGLU, two queries a key) that `headlab export` writes for transformers.

    headlab train --config=configs/llama_tiny.py --workdir=runs/llama_tiny
    headlab export --workdir=runs/llama_tiny exported/llama_tiny

Parameters: 39,584 tied; 55,968 untied.
The recipe is that of configs/tiny.py: 60 steps of 8 x 32 tokens, seconds on one CPU.
Run time and held-out loss: not recorded yet.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

TINY = Path(__file__).parent / "tiny.py"


def get_config() -> ConfigDict:
    config = runpy.run_path(str(TINY))["get_config"]()
    config.model.n_heads = 4
    config.model.n_kv_heads = 2
    config.model.position = "rotary"
    config.model.norm = "rms"
    config.model.activation = "swiglu"
    config.model.max_length = 64
    return config
