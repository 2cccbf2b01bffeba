"""llama_tiny: a small Llama (rotary, RMSNorm, SwiGLU, two queries a key) that `headlab export` writes for transformers.

    headlab train --config=configs/llama_tiny.py --workdir=runs/llama_tiny
    headlab export --workdir=runs/llama_tiny exported/llama_tiny

Parameters: 39,584 tied; 55,968 untied.
Tokens: 60 steps of 8 x 32; seconds on one CPU, for tests and notebooks.
Run time and held-out loss: not recorded yet.
"""

from ml_collections import ConfigDict

from headlab.config import default_config


def get_config() -> ConfigDict:
    config = default_config()

    config.data.vocab_size = 512
    config.data.seq_len = 32

    config.model.d_model = 32
    config.model.n_layers = 2
    config.model.n_heads = 4
    config.model.n_kv_heads = 2
    config.model.position = "rotary"
    config.model.norm = "rms"
    config.model.activation = "swiglu"
    config.model.max_length = 64

    config.optimizer.peak_rate = 1e-2  # so short a run needs large steps
    config.optimizer.warmup_steps = 6

    config.train.steps = 60
    config.train.batch_size = 8
    config.eval.every = 20
    config.checkpoint.every = 10
    config.log.every = 5
    return config
