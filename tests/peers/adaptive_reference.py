"""The same adaptive softmax in headlab and in PyTorch's `AdaptiveLogSoftmaxWithLoss`: parameters, inputs, results.

PyTorch is imported where it is used, so that the goldens can be checked without it.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.embeddings import Constant
from headlab.heads.adaptive import Adaptive

VOCABULARY, WIDTH, TOKENS = 53, 12, 56
VARIANTS = {
    "three tails, the last of one token": dict(cutoffs=(8, 20, 52), div_value=2.0),
    "with a bias, widths 12 and 3": dict(cutoffs=(30,), head_bias=True),
    "tails as wide as the states": dict(cutoffs=(1, 10), div_value=1.0, head_bias=True),
}


def inputs(name: str) -> dict[str, np.ndarray]:
    """States, targets (every token, in no order) and parameters by their paths, float32."""
    rng = np.random.default_rng(len(name))
    head = Adaptive(vocab_size=VOCABULARY, d_model=WIDTH, rngs=nnx.Rngs(0), **_options(name))
    found = {
        path: (rng.normal(size=value.shape) * 0.6).astype(np.float32)
        for path, value in flatten(nnx.state(head, nnx.Param)).items()
    }
    every = np.concatenate([np.arange(VOCABULARY), rng.integers(0, VOCABULARY, TOKENS)])[:TOKENS]
    h = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    return {**found, "h": h, "targets": rng.permutation(every).astype(np.int32)}


def head_of(name: str, given: dict[str, np.ndarray]) -> Adaptive:
    """headlab's head with the parameters of `inputs`; PyTorch has no offset and the order of ids."""
    head = Adaptive(vocab_size=VOCABULARY, d_model=WIDTH, rngs=nnx.Rngs(0), **_options(name))
    graph, params, constants = nnx.split(head, nnx.Param, Constant)
    values = [jnp.asarray(given[path]) for path in flatten(params)]
    return nnx.merge(graph, nnx.State(_unflatten(params, values)), constants)


def flatten(params) -> dict[str, np.ndarray]:
    """Arrays by path, such as "tails/0/kernel"."""
    return {
        "/".join(str(part) for part in path): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(params)
    }


def torch_results(name: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PyTorch's log_probs and nll, and the gradients of Σ nll in states and parameters by their paths, in float64."""
    import torch

    options = _options(name)
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(
        WIDTH,
        VOCABULARY,
        list(options["cutoffs"]),
        div_value=options.get("div_value", 4.0),
        head_bias=options.get("head_bias", False),
        dtype=torch.float64,
    )
    parameters = {"weight": (module.head.weight, False)}
    if module.head.bias is not None:
        parameters["bias"] = (module.head.bias, False)
    for i, (down, up) in enumerate(module.tail):
        parameters[f"tails/{i}/kernel"] = (
            down.weight,
            True,
        )  # [width, d] where headlab's is [d, width]
        parameters[f"tails/{i}/weight"] = (up.weight, False)
    with torch.no_grad():
        for path, (parameter, turned) in parameters.items():
            value = torch.from_numpy(given[path].astype(np.float64))
            parameter.copy_(value.T if turned else value)
    h = torch.from_numpy(given["h"].astype(np.float64)).requires_grad_()
    nll = -module(h, torch.from_numpy(given["targets"].astype(np.int64))).output
    nll.sum().backward()
    gradients = {
        path: (p.grad.T if turned else p.grad).numpy() for path, (p, turned) in parameters.items()
    }
    with torch.no_grad():
        log_probs = module.log_prob(h).numpy()
    return {
        "log_probs": log_probs,
        "nll": nll.detach().numpy(),
        "gradients/h": h.grad.numpy(),
        **{f"gradients/{path}": gradient for path, gradient in gradients.items()},
    }


def _options(name: str) -> dict:
    return {**VARIANTS[name], "cluster_offset": False}


def _unflatten(params, values):
    flat = {path: values[i] for i, (path, _) in enumerate(nnx.to_flat_state(params))}
    return nnx.from_flat_state(
        {path: leaf.replace(flat[path]) for path, leaf in nnx.to_flat_state(params)}
    )
