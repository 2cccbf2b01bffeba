"""Claims about what training makes of tied and untied models: repetition, rare tokens, where parameters are spent."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.claims.findings import (
    DEPENDS,
    FAILS,
    HOLDS,
    Finding,
    above,
    at_most,
    interval,
)
from experiments.claims.runs import SPLIT, Context
from headlab import analysis
from headlab.errors import HeadlabError

AS_WELL = 0.02  # nats a token that a model may lose and still do as well
SAME = 0.05  # share of a norm within which another is the same
RARER_HALF = slice(5, 10)  # of the ten frequency bands of result.json


def self_repetition(context: Context) -> Finding:
    """The mass that tied and untied runs give to the token at hand as the next one."""

    def mass(path: Path) -> float:
        held = context.held_out(path)
        model = held.restored.model
        return analysis.self_repetition(
            model.head, held.h, held.inputs, held.targets, embedding=model.embedding
        ).mass

    return mass_finding(_each(context, "tied", mass), _each(context, "untied", mass))


def mass_finding(tied: Mapping[int, float], untied: Mapping[int, float]) -> Finding:
    """The verdict on masses by seed."""
    difference = interval(tied, untied)
    found = f"{_mean(tied):.4f} tied, {_mean(untied):.4f} untied: {difference.text()}"
    figures = {"tied": _mean(tied), "untied": _mean(untied), "difference": difference}
    return Finding(figures, above(difference, 0), found)


def rare_gradient(context: Context) -> Finding:
    """How much of the gradient of a tied table's rows comes by the look-up, for rare and for frequent tokens."""
    shares: dict[str, dict[int, float]] = {"rare": {}, "frequent": {}}
    for seed, path in context.runs["tied"].items():
        held = context.held_out(path)
        length = held.restored.config.data.seq_len
        whole = (len(held.inputs) // length) * length
        arrays = (part[:whole].reshape(-1, length) for part in (held.inputs, held.targets))
        looked_up, output = role_gradients(held.restored.model, *arrays)
        counts = _counts(path, held.restored)
        for name, ids in (("rare", rare_ids(counts)), ("frequent", frequent_ids(counts))):
            shares[name][seed] = input_share(looked_up[ids], output[ids])
    return share_finding(shares["rare"], shares["frequent"])


def role_gradients(
    model: Any, inputs: Int[np.ndarray, "batch length"], targets: Int[np.ndarray, "batch length"]
) -> tuple[Float[np.ndarray, "rows d"], Float[np.ndarray, "rows d"]]:
    """The gradient of Σ nll in a tied table, split into that of the look-up and that of the output role."""
    import jax

    from headlab import models

    graph, params, constants = models.split(model)
    table = params["embedding"]["weight"]

    def nats(looked_up, output):
        reading, writing = (
            models.merge(graph, {**params, "embedding": {"weight": weight}}, constants)
            for weight in (looked_up, output)
        )
        h = reading(inputs)
        return writing.head.nll(h, targets, embedding=writing.embedding).sum()

    looked_up, output = jax.jit(jax.grad(nats, argnums=(0, 1)))(table, table)
    return np.asarray(looked_up), np.asarray(output)


def input_share(looked_up: Float[np.ndarray, "n d"], output: Float[np.ndarray, "n d"]) -> float:
    """Σ‖g of the look-up‖² ÷ (that + Σ‖g of the output role‖²)."""
    one, other = (float(np.sum(np.square(part, dtype=np.float64))) for part in (looked_up, output))
    return one / (one + other)


def share_finding(rare: Mapping[int, float], frequent: Mapping[int, float]) -> Finding:
    """The verdict on the input role's shares by seed."""
    share = interval(rare)
    found = f"{share.text('.3f')} of it is by the input role; of the most frequent tenth {_mean(frequent):.3f}"
    return Finding({"rare": share, "frequent": _mean(frequent)}, above(share, 0.5), found)


def rare_norms(context: Context) -> Finding:
    """The mean norm of rare tokens' output rows, tied and untied."""

    def norm(path: Path) -> float:
        held = context.held_out(path)
        model = held.restored.model
        rows = analysis.output_rows(model.head, model.embedding)
        ids = rare_ids(_counts(path, held.restored))
        return float(np.linalg.norm(rows[ids], axis=1).mean())

    return norm_finding(_each(context, "tied", norm), _each(context, "untied", norm))


def norm_finding(tied: Mapping[int, float], untied: Mapping[int, float]) -> Finding:
    """The verdict on mean norms by seed."""
    difference, reach = interval(tied, untied), SAME * _mean(untied)
    verdict = DEPENDS
    if difference.low > 0 or difference.high < 0:
        verdict = HOLDS
    elif -reach <= difference.low and difference.high <= reach:
        verdict = FAILS
    found = f"{_mean(tied):.3f} tied, {_mean(untied):.3f} untied: {difference.text('+.3f')}"
    figures = {"tied": _mean(tied), "untied": _mean(untied), "difference": difference}
    return Finding(figures, verdict, found)


def rare_loss(context: Context) -> Finding:
    """The held-out loss on the rarer half of the vocabulary, tied and untied."""
    losses = [
        _each(context, head, lambda path: band_loss(_result(path))) for head in ("tied", "untied")
    ]
    difference = interval(*losses)
    found = f"{_mean(losses[0]):.3f} tied, {_mean(losses[1]):.3f} untied: {difference.text('+.3f')}"
    figures = {"tied": _mean(losses[0]), "untied": _mean(losses[1]), "difference": difference}
    return Finding(figures, at_most(difference, 0), found)


def band_loss(result: Mapping[str, Any], bands: slice = RARER_HALF) -> float:
    """Nats a token over some frequency bands of a result.json, each token counted once.

    Raises HeadlabError where no held-out target is in them.
    """
    tokens = result[SPLIT]["band_tokens"][bands]
    if not sum(tokens):
        raise HeadlabError(
            f"no target of the {SPLIT} split is in the frequency bands {bands.start} … {bands.stop - 1}, so that there "
            "is no loss on rare tokens; take more text"
        )
    losses = result[SPLIT]["bands"][bands]
    nats = sum(loss * n for loss, n in zip(losses, tokens, strict=True) if n)
    return nats / sum(tokens)


def matched_width(context: Context) -> Finding:
    """Tied with untied's parameters in a wider MLP, beside untied."""
    return matched(context, "wide")


def matched_depth(context: Context) -> Finding:
    """Tied with untied's parameters in more blocks, beside untied."""
    return matched(context, "deep")


def matched(context: Context, variant: str) -> Finding:
    """The held-out loss of a larger tied model beside that of the untied one with as many parameters."""
    losses = {
        name: _each(context, name, lambda path: _result(path)[SPLIT]["loss"])
        for name in (variant, "untied", "tied")
    }
    sizes = {
        name: _result(next(iter(context.runs[name].values())))["parameters"]["total"]
        for name in losses
    }
    return matched_finding(
        losses[variant], losses["untied"], losses["tied"], sizes[variant], sizes["untied"]
    )


def matched_finding(
    larger: Mapping[int, float],
    untied: Mapping[int, float],
    tied: Mapping[int, float],
    parameters: int,
    untied_parameters: int,
) -> Finding:
    """The verdict on held-out losses by seed."""
    difference = interval(larger, untied)
    figures = {
        "loss": _mean(larger),
        "untied": _mean(untied),
        "tied": _mean(tied),
        "difference": difference,
        "parameters": parameters,
        "untied_parameters": untied_parameters,
    }
    found = (
        f"{_mean(larger):.3f} with {parameters:,} parameters, untied {_mean(untied):.3f} with {untied_parameters:,}: "
        f"{difference.text('+.3f')}; tied as it is {_mean(tied):.3f}"
    )
    return Finding(figures, at_most(difference, AS_WELL), found)


def rare_ids(counts: Int[np.ndarray, "vocab"]) -> Int[np.ndarray, "n"]:
    """The rarest tenth of the tokens that training text has."""
    return _by_count(counts)[-max(int(np.sum(counts > 0)) // 10, 1) :]


def frequent_ids(counts: Int[np.ndarray, "vocab"]) -> Int[np.ndarray, "n"]:
    """The most frequent tenth of them."""
    return _by_count(counts)[: max(int(np.sum(counts > 0)) // 10, 1)]


def _by_count(counts: np.ndarray) -> np.ndarray:
    """Ids that occur, the most frequent first."""
    order = np.argsort(-counts, kind="stable")
    return order[: int(np.sum(counts > 0))]


def _counts(path: Path, restored: Any) -> np.ndarray:
    from headlab.runs import RunDirectory, dataset_of

    return dataset_of(RunDirectory(path), restored).store.counts


def _each(context: Context, variant: str, value: Callable[[Path], float]) -> dict[int, float]:
    return {seed: value(path) for seed, path in context.runs[variant].items()}


def _result(path: Path) -> dict[str, Any]:
    return json.loads((path / "result.json").read_text(encoding="utf-8"))


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))
