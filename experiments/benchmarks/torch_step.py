"""The same training step in PyTorch, compiled, as a process that answers on its standard output.

Run by `train_step.py` with whatever Python has torch; it needs torch and NumPy alone. Its argument
is a JSON object, each line on standard input a request `{"rates": […]}` with the learning rate of
each step to make, and each answer `{"seconds": […], "loss": …}`: seconds a step, and the loss in
nats a token before the last update.
"""

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`."""

    def __init__(self, d, n_heads, d_mlp):
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.RMSNorm(d, eps=1e-6)
        self.query, self.key, self.value, self.output = (
            nn.Linear(d, d, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.RMSNorm(d, eps=1e-6)
        self.up = nn.Linear(d, d_mlp, bias=False)
        self.down = nn.Linear(d_mlp, d, bias=False)

    def forward(self, x):
        batch, length, d = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).view(batch, length, self.n_heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Token ids and targets [batch, length] to the mean cross-entropy in nats."""

    def __init__(self, *, vocab_size, d_model, n_layers, n_heads, d_mlp, max_length, tied):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(torch.zeros(max_length, d_model))
        self.blocks = nn.ModuleList([Block(d_model, n_heads, d_mlp) for _ in range(n_layers)])
        self.final_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs, targets):
        x = self.embedding(inputs) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load(model, params):
    """Copies headlab's parameters, by their paths, into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[0] == "blocks" and parts[2] in ("up", "down"):
                parts.insert(2, "mlp")
            elif parts[0] == "blocks" and not parts[2].endswith("norm"):
                parts.insert(2, "attention")
            if parts[0] == "blocks" and not parts[2].endswith("norm"):
                value = params["/".join([*parts[:-1], "kernel"])].T
            elif parts[-2:-1] and parts[-2].endswith("norm"):
                value = params["/".join([*parts[:-1], "gain"])]
            else:
                value = params["/".join(parts)]
            assert value.shape == tuple(parameter.shape), (name, value.shape, parameter.shape)
            parameter.copy_(torch.from_numpy(value.copy()))


def main():
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    model = Decoder(**asked["model"])
    load(model, np.load(asked["params"]))
    inputs, targets = (
        torch.from_numpy(array.astype(np.int64)) for array in np.load(asked["batches"]).values()
    )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    o = asked["optimizer"]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o["weight_decay"]},
            {"params": gains, "weight_decay": 0.0},
        ],
        betas=(o["b1"], o["b2"]),
        eps=o["eps"],
        fused=True,
    )
    compiled = torch.compile(model)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    number = 0
    for line in sys.stdin:
        request = json.loads(line)
        seconds = []
        for rate in request["rates"]:
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = compiled(inputs[number % len(inputs)], targets[number % len(inputs)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last = loss.item()
            seconds.append(time.perf_counter() - start)
            number += 1
        print(json.dumps({"seconds": seconds, "loss": last}), flush=True)


if __name__ == "__main__":
    main()
