"""Writes adaptive_goldens.npz, PyTorch's adaptive softmax in float64: `python tests/peers/make_adaptive_goldens.py`.

Make it anew when the variants of adaptive_reference.py change, and say why in the commit.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import adaptive_reference as reference

PATH = Path(__file__).with_name("adaptive_goldens.npz")


def main() -> None:
    arrays = {}
    for name in reference.VARIANTS:
        given = reference.inputs(name)
        arrays |= {f"{name}/given/{key}": value for key, value in given.items()}
        found = reference.torch_results(name, given)
        arrays |= {f"{name}/torch/{key}": value for key, value in found.items()}
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
