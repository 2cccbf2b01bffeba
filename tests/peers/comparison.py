"""How far headlab's float32 training may be from a float64 reference, and arrays summed up in five numbers."""

import math

import numpy as np
from peers import recipe

UNIT = 2.0**-24  # half the distance between 1 and the next float32


def relative_error(config) -> float:
    """The normwise relative error of a loss or gradient in float32: 4·√n·u after n roundings in a row.

    Roundings of independent sign add up like a random walk (Higham & Mary 2019), of which 4 are deviations that do
    not happen. The chain is every sum from the embedding to the loss, twice that far back, and over the tokens.
    """
    m = config.model
    width = m.d_model // m.n_heads
    attention = (
        3 * m.d_model + width + 2 * recipe.LENGTH
    )  # norm, query, scores, softmax, mix, output
    mlp = 2 * m.d_model + m.d_mlp  # norm, up, down
    forward = m.n_layers * (attention + mlp) + 2 * m.d_model + recipe.VOCABULARY
    return 4 * math.sqrt(3 * forward + recipe.BATCH * recipe.LENGTH) * UNIT


def gradient_bounds(config, norms: dict[str, float], unclipped: float) -> dict[str, float]:
    """A bound on ‖error‖₂ of each clipped gradient, whose norms are given.

    A gradient may be smaller than the terms it is summed of (that of a key's bias is exactly 0 under learned
    positions); these are taken as 1/64 of the whole gradient. PyTorch clips by c / (norm + 10⁻⁶), Optax by c / norm.
    """
    relative = relative_error(config) + (1e-6 / unclipped if config.optimizer.clip_norm else 0)
    whole = math.hypot(*norms.values())
    return {path: relative * (norm + whole / 64) for path, norm in norms.items()}


def parameter_bounds(
    config, gradients: dict[str, float], norms: dict[str, float]
) -> dict[str, float]:
    """A bound on ‖error‖₂ of each parameter after all steps, from those of gradients.

    A step's m̂/(√v̂ + ε) has |m̂| ≤ about √v̂, and a change δ of the gradients moves both by at most δ, hence the quotient
    by at most 2δ/ε. As much again is given for later gradients being those of slightly other parameters. Each step
    rounds its sum once.
    """
    groups = config.groups
    largest = max(groups[name].rate_multiplier for name in groups)
    reach = recipe.STEPS * config.optimizer.peak_rate * largest * 2 * 2 / config.optimizer.eps
    return {path: reach * gradients[path] + recipe.STEPS * UNIT * norms[path] for path in norms}


def summary(path: str, array: np.ndarray) -> list[float]:
    """[‖x‖₂, x · noise of norm 1, first, middle and last entry]: an error of norm e moves each by at most e."""
    x = array.astype(np.float64).ravel()
    direction = recipe.noise(f"probe/{path}", x.size)
    direction /= np.linalg.norm(direction)
    entries = [x[0], x[x.size // 2], x[-1]]
    return [float(v) for v in (np.linalg.norm(x), x @ direction, *entries)]
