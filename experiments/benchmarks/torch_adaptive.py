"""PyTorch's adaptive softmax, forward and backward, as a process that answers on its standard output.

Run by `adaptive.py` with whatever Python has torch; it needs torch and NumPy alone. Its argument is a JSON object,
each line on standard input a request for one turn, each answer `{"seconds": …, "loss": …}`.
"""

import json
import sys
import time

import numpy as np
import torch

LOSS_TOLERANCE = 1e-5  # relative


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    arrays = np.load(asked["arrays"])
    cutoffs, vocab = asked["cutoffs"], asked["vocab_size"]
    states = torch.from_numpy(arrays["h"])
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(
        states.shape[-1], vocab, cutoffs, div_value=asked["div_value"]
    )
    with torch.no_grad():
        module.head.weight.copy_(torch.from_numpy(arrays["weight"]))
        for i, (down, up) in enumerate(module.tail):
            down.weight.copy_(torch.from_numpy(arrays[f"kernel{i}"]).T)
            up.weight.copy_(torch.from_numpy(arrays[f"weight{i}"]))
    batches = torch.from_numpy(arrays["targets"].astype(np.int64))

    def turn(number: int) -> tuple[float, float]:
        h = states.clone().requires_grad_()
        module.zero_grad(set_to_none=True)
        targets = batches[number % len(batches)]
        start = time.perf_counter()
        loss = module(h, targets).loss
        loss.backward()
        return time.perf_counter() - start, loss.item()

    loss = turn(0)[1]
    if not abs(loss / asked["loss"] - 1) < LOSS_TOLERANCE:
        raise SystemExit(
            f"PyTorch's loss is {loss} and headlab's {asked['loss']}: they do not compute the same"
        )
    print(json.dumps({"version": torch.__version__}), flush=True)
    for number, _ in enumerate(sys.stdin):
        seconds, loss = turn(number)
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
