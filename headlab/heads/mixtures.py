"""Mixtures of K experts: of their softmaxes, of their sigsoftmaxes, or of their contexts (Yang et al. 2018).

Expert k has a context c_k = tanh(h·W_k + b_k), and the prior π = softmax(h·Π) weighs the experts at each position. A
mixture of softmaxes, p(v) = Σ_k π_k · softmax(map(c_k · Eᵀ + b))_v, is computed in log space:
log p(v) = logsumexp_k(log π_k + log p_k(v)). Its logarithm is not of bounded rank; a mixture of contexts,
softmax(map((Σ_k π_k·c_k) · Eᵀ + b)), costs one softmax and is.
"""

from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from headlab.costs import HeadCost, Mode
from headlab.heads.base import Loss
from headlab.heads.blocks import add_real, cut_rows, numbered
from headlab.heads.folded import folded_report
from headlab.heads.output_matrix import OutputMatrix, Projection
from headlab.ops import TokenReport, block_logits, linear_loss, linear_statistics
from headlab.ops.shards import sum_shards, take_rows


class MixtureNormaliser(NamedTuple):
    """log p_k(v) = (t_kv − max_k) − log_sum_k; log p(v) = logsumexp_k(log_prior_k + log p_k(v))."""

    contexts: jax.Array  # [tokens, K, d_latent]
    log_prior: jax.Array  # [tokens, K]
    max: jax.Array  # [tokens, K]
    log_sum: jax.Array  # [tokens, K]


class Mixture(OutputMatrix):
    """What all mixtures share: the experts' contexts, their prior, and the sums that say how they are used."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        n_experts: int = 4,
        d_latent: int | None = None,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """
        Args:
            n_experts: K, ≥ 1; one expert has no prior.
            d_latent: width of the contexts, ≥ 1; None is d_model.
            tied: take the model's input embedding for E; needs d_latent = d_model. Else the rows of E start normal
                with standard deviation `init_scale / √d_latent`.
            bias: adds a learned bias a token to the logits of every expert, zero at first.
            softcap, logit_scale, logits_dtype: see `LinearHead`.

        W_k and Π start normal with standard deviation 1/√d_model, each expert's drawn for itself, b_k at zero.

        Raises:
            ValueError: naming the value and the range.
        """
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            rngs=rngs,
            vocab_multiple=vocab_multiple,
            init_scale=init_scale,
            d_latent=d_latent,
            tied=tied,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )
        if n_experts < 1:
            raise ValueError(f"n_experts is {n_experts}; it must be at least 1")
        self.n_experts = n_experts
        self.latent = Projection(d_model, n_experts * self.d_latent, rngs=rngs, bias=True)
        self.prior = Projection(d_model, n_experts, rngs=rngs) if n_experts > 1 else None

    def _contexts(self, h) -> Float[Array, "tokens n_experts d_latent"]:
        """tanh(h·W_k + b_k) of every expert, in the dtype of h."""
        return self.latent.contexts(h, self.d_latent)

    def _log_prior(self, h) -> Float[Array, "tokens n_experts"]:
        """log softmax(h·Π), float32 at least."""
        if self.prior is None:
            return jnp.zeros((h.shape[0], 1), jnp.promote_types(h.dtype, jnp.float32))
        return jax.nn.log_softmax(self.prior.wide(h), axis=1)

    def _metrics(self, log_prior, where) -> dict[str, Array]:
        """Sums over counted positions: the prior's entropy in nats, and the prior of each expert."""
        log_prior = jax.lax.stop_gradient(log_prior)
        prior = jnp.where(where[:, None], jnp.exp(log_prior), 0)
        use = jnp.sum(prior, axis=0).astype(jnp.float32)
        entropy = -jnp.sum(prior * log_prior).astype(jnp.float32)
        return {"prior_entropy": entropy, **{f"expert_{k}": use[k] for k in range(self.n_experts)}}

    def _mixture_cost(self, mode: Mode, products: int) -> HeadCost:
        kernels = self.d_model * self.n_experts * (self.d_latent + (self.prior is not None))
        biases = self.n_experts * self.d_latent
        return self._cost(mode, products=products, kernels=kernels, biases=biases)


class MixtureOfSoftmaxes(Mixture):
    """p(v) = Σ_k π_k · softmax(map(c_k · Eᵀ + b))_v; see `Mixture` for its options.

    The experts stand beside the tokens in one blockwise softmax: memory and work are those of one linear head with
    n_experts times the tokens. Label smoothing needs Σ_v log p(v), which is a second pass over the vocabulary.
    """

    def normalise(self, h, embedding):
        contexts, log_prior = self._contexts(h), self._log_prior(h)
        statistics = self._statistics(contexts, jnp.zeros(h.shape[0], jnp.int32), embedding)
        return MixtureNormaliser(contexts, log_prior, statistics.max, statistics.log_sum)

    def _statistics(self, contexts, targets, embedding):
        """Each expert's statistics, all [tokens, K]."""
        weight, bias = self._arrays(embedding)
        flat = contexts.reshape(-1, self.d_latent)
        repeated = jnp.repeat(targets, self.n_experts)
        statistics = linear_statistics(flat, weight, bias, repeated, self.spec)
        return jax.tree.map(lambda a: a.reshape(-1, self.n_experts), statistics)

    def log_prob_block(self, h, norm, segment, start, size, embedding):
        weight, bias = self._arrays(embedding)
        rows, own_bias = cut_rows((weight, bias), start, size)
        logits = block_logits(norm.contexts.reshape(-1, self.d_latent), rows, own_bias, self.spec)
        log_probs = _mix(logits.reshape(-1, self.n_experts, size), norm)
        return numbered(log_probs, start, segment.size, weight)

    def log_prob_at(self, h, norm, ids, embedding):
        weight, bias = self._arrays(embedding)
        known = (ids >= 0) & (ids < self.vocab_size)
        (rows, own_bias), mine = take_rows((weight, bias), jnp.where(known, ids, 0))
        own_bias = None if own_bias is None else own_bias[:, None]
        logits = jax.vmap(lambda c, row, b: block_logits(c, row, b, self.spec))(
            norm.contexts, rows[:, None], own_bias
        )
        logits = sum_shards(jnp.where(mine[:, None, None], logits, 0), weight)
        return jnp.where(known, _mix(logits, norm)[:, 0], jnp.nan)

    def z_penalty(self, norm):
        """Σ_k π_k · lse_k²."""
        return jnp.sum(jnp.exp(norm.log_prior) * (norm.max + norm.log_sum) ** 2, axis=1)

    def _report(self, h, ids, k, embedding) -> TokenReport:
        return folded_report(self, h, ids, k, embedding)

    def _log_partition(self, norm):
        return None

    def _block_rows(self, tokens, segment):
        return super()._block_rows(tokens * self.n_experts, segment)

    def _nll(self, h, targets, embedding):
        statistics = self._statistics(self._contexts(h), targets, embedding)
        return -logsumexp(self._log_prior(h) - statistics.nll, axis=1)

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        contexts, log_prior = self._contexts(h), self._log_prior(h)
        statistics = self._statistics(contexts, targets, embedding)
        norm = MixtureNormaliser(contexts, log_prior, statistics.max, statistics.log_sum)
        nll = -logsumexp(log_prior - statistics.nll, axis=1)
        objective = nll
        if label_smoothing:
            total = self._total(h, norm, embedding, jnp.zeros_like(nll), add_real)
            uniform_nll = -total / self.vocab_size
            objective = (1 - label_smoothing) * nll + label_smoothing * uniform_nll
        if z_loss_weight:
            objective = objective + z_loss_weight * self.z_penalty(norm)
        nats = jnp.sum(jnp.where(where, jax.lax.stop_gradient(nll), 0))
        weight = jnp.sum(where, dtype=nats.dtype)
        objective = jnp.sum(jnp.where(where, objective, 0))
        return Loss(objective, nats, weight, self._metrics(log_prior, where))

    def rank_bound(self) -> int | None:
        """None, or with one expert d_latent + 1, and 1 more with a bias; a soft cap or sigsoftmax promises nothing."""
        return super().rank_bound() if self.n_experts == 1 else None

    def rank_reason(self) -> str:
        if self.n_experts == 1:
            return super().rank_reason()
        return f"the logarithm of a sum of {self.n_experts} softmaxes isn't linear in any context (Yang et al. 2018)"

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        """K softmaxes, the experts' projections and the prior; all three modes compute all of it for every token."""
        return self._mixture_cost(mode, self.n_experts)


class MixtureOfSigSoftmaxes(MixtureOfSoftmaxes):
    """A mixture of softmaxes with each expert's map ending in sigsoftmax (Kanai et al. 2018)."""

    sigsoftmax: ClassVar[bool] = True


class MixtureOfContexts(Mixture):
    """p = softmax(map((Σ_k π_k·c_k) · Eᵀ + b)): one softmax of the mixed context; see `Mixture` for its options.

    The baseline of Yang et al. 2018 for a mixture of softmaxes: as many parameters, but rank d_latent + 1.
    """

    def _mixed(self, h) -> tuple[Float[Array, "tokens d_latent"], Float[Array, "tokens n_experts"]]:
        """(Σ_k π_k·c_k in the dtype of h, log π)."""
        log_prior = self._log_prior(h)
        contexts = self._contexts(h).astype(log_prior.dtype)
        mixed = jnp.sum(jnp.exp(log_prior)[..., None] * contexts, axis=1)
        return mixed.astype(h.dtype), log_prior

    def _context(self, h):
        return self._mixed(h)[0]

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        context, log_prior = self._mixed(h)
        weight, bias = self._arrays(embedding)
        sums = linear_loss(
            context,
            weight,
            bias,
            targets,
            where,
            self.spec,
            z_loss_weight=z_loss_weight,
            label_smoothing=label_smoothing,
        )
        return Loss(*sums, self._metrics(log_prior, where))

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        """One softmax, the experts' projections and the prior."""
        return self._mixture_cost(mode, 1)


def _mix(logits, norm: MixtureNormaliser):
    """log p, [tokens, size], of every expert's logits [tokens, K, size]."""
    own = (logits - norm.max[..., None]) - norm.log_sum[..., None]
    return logsumexp(norm.log_prior[..., None] + own, axis=1)
