"""small: eight blocks of width 512 over 16,384 tokens, rotary and SwiGLU in bfloat16; for one GPU.

    headlab train --config=configs/small.py --workdir=runs/small
    headlab train --config=configs/small.py --config.head.name=untied --workdir=runs/small_untied

Parameters: 33,595,904 tied; 41,984,512 untied.
Tokens: 2,000 steps of 64 x 512, twelve times those of the embedded corpus, hence the dropout.
Run time and held-out loss: not recorded yet.
"""

from ml_collections import ConfigDict

from headlab.config import default_config


def get_config() -> ConfigDict:
    config = default_config()

    config.data.vocab_size = 16384
    config.data.seq_len = 512

    config.model.d_model = 512
    config.model.n_layers = 8
    config.model.n_heads = 8
    config.model.position = "rotary"
    config.model.activation = "swiglu"
    config.model.max_length = 512
    config.model.dropout = 0.1

    config.optimizer.peak_rate = 1e-3

    config.train.steps = 2000
    config.train.batch_size = 64
    config.train.compute_dtype = "bfloat16"
    config.eval.every = 250
    config.checkpoint.every = 250
    return config
