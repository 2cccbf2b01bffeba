"""The decoder again, in plain NumPy and float64, from its parameters: what the tests compare headlab with."""

import math

import numpy as np
from scipy.special import logsumexp


def hidden_states(params, model, tokens):
    """Final hidden states [batch, length, d_model] of `tokens` by the textbook formulas."""
    params = _wide(params)
    x = params["embedding"]["weight"][tokens]
    length = tokens.shape[1]
    if model.position == "learned":
        x = x + params["positions"][:length]
    for i in range(model.n_layers):
        block = params["blocks"][i]
        x = x + _attention(block["attention"], model, _norm(block["attention_norm"], model, x))
        x = x + _mlp(block["mlp"], model, _norm(block["mlp_norm"], model, x))
    return _norm(params["final_norm"], model, x)


def log_probs(params, model, tokens, vocab_size):
    """Log-probabilities [batch, length, vocab_size]; the untied matrix where the head has one, else the table."""
    h = hidden_states(params, model, tokens)
    head = _wide(params).get("head", {})
    weight = head.get("weight", _wide(params)["embedding"]["weight"])[:vocab_size]
    logits = h @ weight.T + head.get("bias", np.zeros(len(weight)))[:vocab_size]
    return logits - logsumexp(logits, axis=-1, keepdims=True)


def _wide(tree):
    if isinstance(tree, dict):
        return {key: _wide(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def _norm(p, model, x):
    if model.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * p["gain"]
    return y + p.get("bias", 0)


def _project(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def _attention(p, model, x):
    batch, length, d = x.shape
    width = model.d_head or d // model.n_heads
    mixed = np.empty((batch, length, model.n_heads * width))
    q, k, v = (_project(p[name], x) for name in ("query", "key", "value"))
    for b in range(batch):
        for head in range(model.n_heads):
            shared = head // (model.n_heads // model.n_kv_heads)
            qs = q[b, :, head * width : (head + 1) * width]
            ks = k[b, :, shared * width : (shared + 1) * width]
            vs = v[b, :, shared * width : (shared + 1) * width]
            if model.position == "rotary":
                qs, ks = _rotated(qs, model), _rotated(ks, model)
            for t in range(length):
                scores = ks[: t + 1] @ qs[t] / math.sqrt(width)
                weights = np.exp(scores - logsumexp(scores))
                mixed[b, t, head * width : (head + 1) * width] = weights @ vs[: t + 1]
    return _project(p["output"], mixed)


def _rotated(x, model):
    length, width = x.shape
    pairs = x[:, : width // 2] + 1j * x[:, width // 2 :]
    frequencies = [model.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    if model.rope_scaling is not None:
        frequencies = [_llama3(f, *model.rope_scaling) for f in frequencies]
    angle = np.outer(np.arange(length), frequencies)
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _llama3(frequency, factor, low, high, original):
    """By cases, as in the code that came with Llama 3.1."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _mlp(p, model, x):
    up = _project(p["up"], x)
    if model.activation == "swiglu":
        gate = _project(p["gate"], x)
        return _project(p["down"], gate / (1 + np.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return _project(p["down"], 0.5 * up * (1 + np.tanh(inner)))
