"""The compiled linear cross-entropy of PyTorch, forward and backward, as a process that answers on its standard output.

Run by `head_loss.py` with whatever Python has torch; it needs torch and NumPy alone. Its argument is a JSON object,
each line on standard input a request for one turn, each answer `{"seconds": …, "loss": …}`.
"""

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    arrays = np.load(asked["arrays"])
    h, weight = (torch.tensor(arrays[name], requires_grad=True) for name in ("h", "weight"))
    targets = torch.tensor(arrays["targets"], dtype=torch.long)

    @torch.compile
    def loss_of(h, weight):
        return F.cross_entropy(h @ weight.T, targets, reduction="sum")

    def turn() -> tuple[float, float]:
        h.grad = weight.grad = None
        start = time.perf_counter()
        loss = loss_of(h, weight)
        loss.backward()
        return time.perf_counter() - start, loss.item()

    turn()
    print(json.dumps({"version": torch.__version__}), flush=True)
    for _ in sys.stdin:
        seconds, loss = turn()
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
