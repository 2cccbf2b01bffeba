"""The decoder, its loss and its training in PyTorch's own parts, from headlab's parameters.

Layers are those of torch.nn.functional; the optimizer is torch.optim.AdamW under LambdaLR and clip_grad_norm_.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from peers import recipe


class Decoder:
    """headlab's decoder and linear heads; `parameters` are headlab's arrays by path, in `dtype`."""

    def __init__(self, parameters: dict[str, np.ndarray], config, dtype=torch.float64):
        self.config = config
        self.parameters = {
            path: torch.nn.Parameter(torch.tensor(value, dtype=dtype))
            for path, value in parameters.items()
        }

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length, vocabulary], without padding."""
        model, head, p = self.config.model, self.config.head, self.parameters
        x = F.embedding(tokens, p["embedding/weight"])
        if model.position == "learned":
            x = x + p["positions"][: tokens.shape[1]]
        for i in range(model.n_layers):
            x = x + self._attention(f"blocks/{i}/attention", x)
            x = x + self._mlp(f"blocks/{i}/mlp", x)
        weight = p["embedding/weight" if head.name == "tied" else "head/weight"]
        bias = p["head/bias"][: recipe.VOCABULARY] if head.bias else None
        z = head.logit_scale * F.linear(
            self._norm("final_norm", x), weight[: recipe.VOCABULARY], bias
        )
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    def losses(self, inputs, targets, where) -> tuple[torch.Tensor, torch.Tensor]:
        """(what training minimises, the pure cross-entropy), means over the counted tokens, nats."""
        train = self.config.train
        logits = self.logits(inputs)[where]
        smoothed = F.cross_entropy(logits, targets[where], label_smoothing=train.label_smoothing)
        z_loss = train.z_loss_weight * logits.logsumexp(-1).square().mean()
        return smoothed + z_loss, F.cross_entropy(logits, targets[where]).detach()

    def _norm(self, path, x):
        gain, bias = self.parameters[f"{path}/gain"], self.parameters.get(f"{path}/bias")
        if self.config.model.norm == "layer":
            return F.layer_norm(x, gain.shape, gain, bias, eps=1e-6)
        return F.rms_norm(x, gain.shape, gain, eps=1e-6)

    def _project(self, path, x):
        kernel, bias = self.parameters[f"{path}/kernel"], self.parameters.get(f"{path}/bias")
        return F.linear(x, kernel.T, bias)

    def _attention(self, path, x):
        model = self.config.model
        x = self._norm(f"{path}_norm", x)
        width = model.d_model // model.n_heads
        query, key, value = (
            self._project(f"{path}/{name}", x).unflatten(-1, (-1, width)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        if model.position == "rotary":
            query, key = (_rotated(a, model.rope_theta) for a in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self._project(f"{path}/output", mixed.transpose(1, 2).flatten(-2))

    def _mlp(self, path, x):
        x = self._norm(f"{path}_norm", x)
        up = self._project(f"{path}/up", x)
        if self.config.model.activation == "swiglu":
            hidden = F.silu(self._project(f"{path}/gate", x)) * up
        else:
            hidden = F.gelu(up, approximate="tanh")
        return self._project(f"{path}/down", hidden)


def _rotated(x, theta):
    """x [..., length, width]: pairs (i, i + width/2) as complex numbers, turned."""
    first, second = x.chunk(2, dim=-1)
    pairs = torch.complex(first, second)
    half = pairs.shape[-1]
    rates = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), rates)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def train(config, start: dict[str, np.ndarray], dtype=torch.float64) -> recipe.Trained:
    """PyTorch's training on the recipe's batches, from headlab's parameters `start` by path."""
    decoder = Decoder(start, config, dtype)
    parameters = decoder.parameters
    optimizer = _adamw(config, parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(config))
    clip = math.inf if config.optimizer.clip_norm is None else config.optimizer.clip_norm
    losses, norms, gradients = [], [], {}
    for step in range(recipe.STEPS):
        inputs, targets, where = recipe.batch(step)
        optimizer.zero_grad()
        objective, loss = decoder.losses(
            torch.tensor(inputs), torch.tensor(targets).long(), torch.tensor(where)
        )
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        losses.append(loss.item())
        norms.append(norm.item())
        gradients = gradients or {path: p.grad.numpy().copy() for path, p in parameters.items()}
        optimizer.step()
        scheduler.step()
    trained = {path: p.detach().numpy().copy() for path, p in parameters.items()}
    return recipe.Trained(losses, norms, gradients, trained)


def _adamw(config, parameters) -> torch.optim.AdamW:
    o = config.optimizer
    groups: dict[tuple[str, bool], list] = {}
    for path, p in parameters.items():
        top = path.split("/")[0]
        name = {"embedding": "embedding", "positions": "embedding", "head": "head"}.get(top, "body")
        groups.setdefault((name, p.ndim == 2), []).append(p)
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "lr": o.peak_rate * config.groups[name].rate_multiplier,
                "weight_decay": config.groups[name].weight_decay if is_matrix else 0.0,
            }
            for (name, is_matrix), members in groups.items()
        ],
        betas=(o.b1, o.b2),
        eps=o.eps,
    )


def _factor(config):
    """The rate of update s = 0, 1, … as a share of the peak."""
    o, warmup = config.optimizer, config.optimizer.warmup_steps

    def factor(s):
        if s < warmup:
            return (s + 1) / warmup
        done = (s - warmup) / (config.train.steps - warmup)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return o.final_fraction + (1 - o.final_fraction) * left[o.schedule]

    return factor
