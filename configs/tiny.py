"""tiny: two blocks of width 32 over 512 tokens; seconds on one CPU, for tests and notebooks.

    headlab train --config=configs/tiny.py --workdir=runs/tiny

Tokens: 60 steps of 8 x 32; evaluated and saved often, so that a killed run can be resumed.
Run time and held-out loss, seed 0: 16 s, most of it to compile and evaluate; tied 5.229 nats a token, untied 5.274.
"""

from ml_collections import ConfigDict

from headlab.config import default_config


def get_config() -> ConfigDict:
    config = default_config()

    config.data.vocab_size = 512
    config.data.seq_len = 32

    config.model.d_model = 32
    config.model.n_layers = 2
    config.model.n_heads = 2
    config.model.max_length = 32

    config.optimizer.peak_rate = 1e-2  # so short a run needs large steps
    config.optimizer.warmup_steps = 6

    config.train.steps = 60
    config.train.batch_size = 8
    config.eval.every = 20
    config.checkpoint.every = 10
    config.log.every = 5
    return config
