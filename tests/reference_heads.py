"""The dense formula of every head in float64, which the contract suite compares everything with.

A new head joins by one entry in `REFERENCES`. Its formula is written from the paper, on whole matrices; the suite
differentiates it automatically.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

VOCAB, WIDTH = 11, 6


class Reference(NamedTuple):
    """A head in dense float64."""

    #: (h [n, d], own parameters as a dict, the embedding's parameters, the case's options) → [n, V] log-probabilities
    #: up to a constant a row
    logits: Callable[[Any, Mapping, Any, Mapping], Any]
    #: values of the constructor's options, the default first
    options: Mapping[str, tuple]
    #: the family's squared log-partition, from the same arguments and the targets; None: logsumexp(logits)²
    z_penalty: Callable[[Any, Mapping, Any, Mapping, Any], Any] | None = None
    #: (the head, a parameter's path) → ids of the tokens whose rows these are, before the padding; None: not rows of
    #: tokens. By default a row of each token by its id, in every array of so many rows
    row_ids: Callable[[Any, str], Any] | None = None
    #: how often a value is rounded to the dtype of the states between them and the logits
    roundings: int = 0
    #: whether its options are mostly those of linear heads, whose pairs are tested there
    follows_linear: bool = True


def _linear(h, weight, own, options):
    z = h @ weight[:VOCAB].T
    if options["bias"]:
        z = z + own["bias"][:VOCAB]
    return _mapped(z, options)


def _mapped(z, options):
    z = options["logit_scale"] * z
    cap = options["softcap"]
    return z if cap is None else cap * jnp.tanh(z / cap)


_LINEAR_OPTIONS = {
    "bias": (False, True),
    "softcap": (None, 3.0),
    "logit_scale": (1.0, -0.7),
}


def _low_rank(h, own, embedding, o):
    factor = embedding["weight"] if o["tied"] else own["weight"]
    return _linear(h @ own["kernel"], factor, own, o)


def _output_rows(own, embedding, options):
    return embedding["weight"] if options["tied"] else own["weight"]


def _sigmoided(t):
    return t + jax.nn.log_sigmoid(t)


def _sigsoftmax(h, own, e, o):
    return _sigmoided(_linear(h, _output_rows(own, e, o), own, o))


def _experts(h, own, options):
    """The experts' contexts [n, K, d_latent] and their prior [n, K]."""
    k = options["n_experts"]
    latent = jnp.tanh(h @ own["latent"]["kernel"] + own["latent"]["bias"])
    prior = jax.nn.softmax(h @ own["prior"]["kernel"], axis=1) if k > 1 else jnp.ones((len(h), 1))
    return latent.reshape(len(h), k, -1), prior


def _mixture(final):
    """log Σ_k π_k·softmax(final(logits_k)), and Σ_k π_k·lse_k²."""

    def experts(h, own, e, o):
        latent, prior = _experts(h, own, o)
        return final(_linear(latent, _output_rows(own, e, o), own, o)), prior

    def logits(h, own, e, o):
        z, prior = experts(h, own, e, o)
        p = jnp.exp(z - logsumexp(z, axis=2, keepdims=True))
        return jnp.log(jnp.einsum("nk,nkv->nv", prior, p))

    def z_penalty(h, own, e, o, targets):
        z, prior = experts(h, own, e, o)
        return jnp.sum(prior * logsumexp(z, axis=2) ** 2, axis=1)

    return Reference(logits, _MIXTURE_OPTIONS, z_penalty, roundings=2)


def _mixture_of_contexts(h, own, e, o):
    latent, prior = _experts(h, own, o)
    return _linear(jnp.einsum("nk,nkd->nd", prior, latent), _output_rows(own, e, o), own, o)


def _mixtape(h, own, e, o):
    """Tokens are in the order of their ids: `token_counts` descend."""
    k, frequent = o["n_experts"], max(1, round(o["frequent_share"] * VOCAB))
    contexts = jnp.tanh(h @ own["context"]["kernel"]).reshape(len(h), k, -1)
    if k == 1:
        frequent, prior = 0, jnp.ones((len(h), VOCAB, 1))
    else:
        states = jnp.tanh(h @ own["gate_context"]["kernel"]).reshape(len(h), k - 1, -1)
        gates = jnp.einsum("njg,vg->nvj", states, own["gate"]["weight"][:frequent])
        gates = jnp.pad(
            gates + own["gate"]["bias"][:frequent], ((0, 0), (0, VOCAB - frequent), (0, 0))
        )
        open_ = jax.nn.sigmoid(gates + (h @ own["shared"]["kernel"])[:, None])
        prior = jnp.ones((len(h), VOCAB, 1))
        for j in range(k - 1):  # a node's share goes to its two children, k leaves in the end
            left = prior[..., :1] * open_[..., j, None]
            prior = jnp.concatenate([prior[..., 1:], left, prior[..., :1] - left], axis=2)
    parts = [(own.get("frequent"), frequent), (own.get("rest"), VOCAB - frequent)]
    own_weight = [part["weight"][:n] for part, n in parts if n and not o["tied"]]
    if o["tied"]:
        sizes = [n for n in (frequent, VOCAB - frequent) if n]
        own_weight = [
            band["weight"][:n] for band, n in zip(e["bands"].values(), sizes, strict=True)
        ]
    weight = jnp.concatenate(own_weight)
    bias = jnp.concatenate([part["bias"][:n] for part, n in parts if n]) if o["bias"] else None
    z = jnp.einsum("nvk,nkd,vd->nv", prior, contexts, weight)
    return _linear(z, jnp.eye(VOCAB), {"bias": bias}, o)


def _mixtape_rows(head, path):
    """Rows of frequent tokens and of the rest; those that the gates have of their own."""
    tokens, part = list(range(head.vocab_size)), path.split("/")[0]
    frequent, rest = tokens[: head.sizes[0]], tokens[head.sizes[0] :]
    if part == "bands":
        return [band for band in (frequent, rest) if band][int(path.split("/")[1])]
    return {"frequent": frequent, "gate": frequent, "rest": rest}.get(part)


def _adaptive(h, own, e, o, targets=None):
    """Log-probabilities, or with `targets` lse_head² + lse² of the target's tail; ids are ordered by their counts."""
    edges = (0, *o["cutoffs"], VOCAB)
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    tails = len(sizes) - 1
    standing = own.get("standing", {})  # what stands for the tails of a tied head

    def rows(shortlist, name):
        parts = [shortlist[: sizes[0]], standing[name]] if standing else [shortlist]
        return jnp.concatenate(parts)[: sizes[0] + tails]

    weight = rows(e["bands"][0]["weight"] if o["tied"] else own["weight"], "weight")
    bias = rows(own["bias"], "bias") if o["head_bias"] else 0.0
    z = _mapped(h @ weight.T + bias, o)
    z = z + jnp.log(jnp.array([1] * sizes[0] + sizes[1:]))
    head, penalty = jax.nn.log_softmax(z), logsumexp(z, axis=1) ** 2
    parts = [head[:, : sizes[0]]]
    for i, size in enumerate(sizes[1:]):
        rows = e["bands"][i + 1]["weight"] if o["tied"] else own["tails"][i]["weight"]
        t = _mapped(h @ own["tails"][i]["kernel"] @ rows[:size].T, o)
        parts.append(head[:, sizes[0] + i, None] + jax.nn.log_softmax(t))
        if targets is not None:
            here = (targets >= edges[i + 1]) & (targets < edges[i + 2])
            penalty += jnp.where(here, logsumexp(t, axis=1) ** 2, 0)
    return jnp.concatenate(parts, axis=1) if targets is None else penalty


def _adaptive_rows(head, path):
    """Rows of a band's tokens; −1 for the rows that stand for the tails."""
    edges = (0, *head.cutoffs, head.vocab_size)
    bands = [list(range(*edge)) for edge in itertools.pairwise(edges)]
    kind, *rest = path.split("/")
    if kind in ("bias", "weight"):
        return bands[0] + [-1] * (0 if head.tied else len(bands) - 1)
    if kind != "standing" and rest and rest[-1] == "weight":
        return bands[int(rest[0]) + (kind == "tails")]
    return None


_MIXTURE_OPTIONS = {"n_experts": (4, 1), "tied": (False, True), **_LINEAR_OPTIONS}

REFERENCES = {
    "tied": Reference(
        lambda h, own, e, o: _linear(h, e["weight"], own, o), _LINEAR_OPTIONS, follows_linear=False
    ),
    "untied": Reference(lambda h, own, e, o: _linear(h, own["weight"], own, o), _LINEAR_OPTIONS),
    "low_rank": Reference(
        _low_rank, {**_LINEAR_OPTIONS, "rank": (None, 2), "tied": (False, True)}, roundings=1
    ),
    "adaptive": Reference(
        _adaptive,
        {
            "cutoffs": ((4, 8), (), (3,)),
            "div_value": (2.0,),  # the default leaves no width where d_model is 6
            "head_bias": (False, True),
            "tied": (False, True),
            "softcap": (None, 3.0),
            "logit_scale": (1.0, -0.7),
        },
        lambda h, own, e, o, targets: _adaptive(h, own, e, o, targets),
        row_ids=_adaptive_rows,
        roundings=1,
    ),
    "sigsoftmax": Reference(_sigsoftmax, {"tied": (False, True), **_LINEAR_OPTIONS}),
    "mixture_of_softmaxes": _mixture(lambda t: t),
    "mixture_of_sigsoftmaxes": _mixture(_sigmoided),
    "mixture_of_contexts": Reference(_mixture_of_contexts, _MIXTURE_OPTIONS, roundings=3),
    "mixtape": Reference(
        _mixtape,
        row_ids=_mixtape_rows,
        options={
            "n_experts": (4, 1),
            "frequent_share": (0.1, 0.5),
            "tied": (False, True),
            **_LINEAR_OPTIONS,
        },
        roundings=3,
    ),
}

#: those above; a head that is being written brings its own
OURS = tuple(REFERENCES)
