"""Published models in numbers, each with its source."""

from headlab.costs.architecture import Architecture
from headlab.errors import UsageError, nearest

PRESETS = {
    # Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", tables 1 and 2
    "gemma-2-2b": Architecture(
        "Gemma 2 2B", 256_128, 2304, 26, 8, 4, 256, 9216, gated=True, tied=True,
        norms_per_block=4, window=4096, n_windowed=13,
    ),
    # Touvron et al. 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models", and its config
    "llama-2-7b": Architecture(
        "Llama 2 7B", 32_000, 4096, 32, 32, 32, 128, 11_008, gated=True, tied=False
    ),
    # Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3
    "llama-3-8b": Architecture(
        "Llama 3 8B", 128_256, 4096, 32, 32, 8, 128, 14_336, gated=True, tied=False
    ),
    # Allal et al. 2025, "SmolLM2: When Smol Goes Big", and the configs of its checkpoints
    "smollm2-135m": Architecture(
        "SmolLM2 135M", 49_152, 576, 30, 9, 3, 64, 1536, gated=True, tied=True
    ),
    "smollm2-360m": Architecture(
        "SmolLM2 360M", 49_152, 960, 32, 15, 5, 64, 2560, gated=True, tied=True
    ),
    "smollm2-1.7b": Architecture(
        "SmolLM2 1.7B", 49_152, 2048, 24, 32, 32, 64, 8192, gated=True, tied=True
    ),
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": the smallest of the four
    "gpt2": Architecture(
        "GPT-2", 50_257, 768, 12, 12, 12, 64, 3072, gated=False, tied=True,
        learned_positions=1024, qkv_bias=True, output_bias=True, mlp_bias=True,
        norm_bias=True,
    ),
    # configs/micro.py
    "micro": Architecture(
        "micro, tied", 8192, 128, 4, 4, 4, 32, 512, gated=False, tied=True, learned_positions=128
    ),
    "micro-untied": Architecture(
        "micro, untied", 8192, 128, 4, 4, 4, 32, 512, gated=False, tied=False,
        learned_positions=128,
    ),
}  # fmt: skip


def preset(name: str) -> Architecture:
    """The model of that name; UsageError, with the nearest, where there is none.

    >>> preset("llama-3-8b").vocab_size
    128256
    """
    if name not in PRESETS:
        raise UsageError(
            f"no model {name!r}; did you mean {nearest(name, PRESETS)}? (there are {', '.join(PRESETS)})"
        )
    return PRESETS[name]
