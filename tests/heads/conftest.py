"""What the contract suite needs to know of each head: its dense formula, and the options that its cases combine.

A new head joins by one entry in `REFERENCES`. Its formula is written from the paper, on whole matrices, in float64;
the suite differentiates it automatically and compares everything that the head computes with it.

Cases: `make test` runs a covering array (every pair of values of any two factors occurs in some case; factors are the
dtype of the states, the padding, and each option), `make test-full` the rest of the whole product (the mark `full`).
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import logsumexp

from headlab import heads
from headlab.embeddings import Table

VOCAB, WIDTH, BATCH = 11, 6, (3, 4)
EPS = float(np.finfo(np.float32).eps)
BF16 = 2.0**-8  # unit round-off


class Reference(NamedTuple):
    """A head in dense float64."""

    #: (h [n, d], own parameters as a dict, table [rows, d], the case's options) → [n, V] log-probabilities up to a
    #: constant a row
    logits: Callable[[Any, Mapping, Any, Mapping], Any]
    #: values of the constructor's options, the default first
    options: Mapping[str, tuple]
    #: the family's squared log-partition, from the same arguments; None: the square of logsumexp(logits)
    z_penalty: Callable[[Any, Mapping, Any, Mapping], Any] | None = None


def _linear(h, weight, own, options):
    z = h @ weight[:VOCAB].T
    if options["bias"]:
        z = z + own["bias"][:VOCAB]
    z = options["logit_scale"] * z
    cap = options["softcap"]
    return z if cap is None else cap * jnp.tanh(z / cap)


_LINEAR_OPTIONS = {
    "bias": (False, True),
    "softcap": (None, 3.0),
    "logit_scale": (1.0, -0.7),
}

REFERENCES = {
    "tied": Reference(lambda h, own, table, o: _linear(h, table, own, o), _LINEAR_OPTIONS),
    "untied": Reference(
        lambda h, own, table, o: _linear(h, own["weight"], own, o), _LINEAR_OPTIONS
    ),
}


class Case(NamedTuple):
    """One head, built one way."""

    name: str
    dtype: str = "float32"
    vocab_multiple: int = 8  # 1: no padding; 8: eleven tokens in sixteen rows
    options: tuple = ()  # pairs

    def __str__(self):
        chosen = "-".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}-{self.dtype}-multiple={self.vocab_multiple}-{chosen}"


def covering(factors: Mapping[str, tuple]) -> list[dict]:
    """Rows of the product of `factors` in which every pair of values of two factors occurs; found greedily."""
    rows = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def _cases() -> list:
    """All cases of all heads; those that no covering array needs carry the mark `full`."""
    cases = []
    for name in heads.names():
        options = REFERENCES[name].options if name in REFERENCES else {}
        factors = {"dtype": ("float32", "bfloat16"), "multiple": (1, 8), **options}
        product = [dict(zip(factors, v, strict=True)) for v in itertools.product(*factors.values())]
        chosen = covering(factors)
        for row in product:
            marks = () if row in chosen else pytest.mark.full
            dtype, multiple, *_ = row.values()
            case = Case(name, dtype, multiple, tuple((key, row[key]) for key in options))
            cases.append(pytest.param(case, marks=marks, id=str(case)))
    return cases


def pytest_generate_tests(metafunc):
    """Gives `case` to tests of every case, and `name` to tests of every registered head."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", _cases())
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", heads.names())


class Problem:
    """A head of a case with parameters drawn afresh, some states and targets, and the dense reference of both.

    Parameters (padding rows too, where a leak would show) and states are representable in bfloat16, so that products
    are exact in every dtype. Blocks are of 4 tokens and 4 rows: 11 rows leave a remainder, 16 a block of padding alone.
    What is compiled is kept for the tests that share a problem; none of them changes it.
    """

    def __init__(self, case: Case, *, token_block=4, row_block=4, seed=0):
        self.case, self.options = case, dict(case.options)
        self.reference = REFERENCES[case.name]
        head = heads.build(
            case.name,
            vocab_size=VOCAB,
            d_model=WIDTH,
            rngs=nnx.Rngs(seed),
            vocab_multiple=case.vocab_multiple,
            token_counts=np.arange(VOCAB, 0, -1),
            **self.options,
        )
        head.block_rows = row_block
        if hasattr(head, "spec"):  # the fused walk of linear heads has blocks of its own
            head.spec = head.spec._replace(token_block=token_block, vocab_block=row_block)
        table = Table(VOCAB, WIDTH, rngs=nnx.Rngs(seed), vocab_multiple=case.vocab_multiple)
        rng = np.random.default_rng(seed)

        def draw(shape):
            return np.asarray(rng.normal(size=shape) * 0.8, ml_dtypes.bfloat16).astype(np.float32)

        self._graphs, states = zip(*map(nnx.split, (head, table)), strict=True)
        self.params = jax.tree.map(lambda a: jnp.asarray(draw(a.shape)), states)
        self.ties_to = head.ties_to
        self.h = jnp.asarray(draw((*BATCH, WIDTH)) * 2, case.dtype)
        self.targets = rng.integers(0, VOCAB, BATCH).astype(np.int32)
        self.where = np.ones(BATCH, bool)
        self.where[0, 2] = self.where[2, 3] = self.where[1, 0] = False
        largest = float(np.abs(self.dense_log_probs()).max())
        # A value is a sum of d products, mapped, shifted and normalised: about d + 8 roundings of numbers no larger
        # than twice the largest log-probability.
        self.value_tolerance = EPS * (WIDTH + 8) * 2 * largest
        # A gradient is a sum of products of (p − [target]), relative error as above, with a state or a weight; in
        # bfloat16 that factor and the result are rounded once each. Relative to the norm; the sum may cancel to half.
        roundings = 0 if case.dtype == "float32" else 2 * BF16
        self.gradient_tolerance = 2 * (roundings + self.value_tolerance)

        self.z, self.alpha = 0.05, 0.0 if head.smoothing_refused else 0.1
        self.score, self.step = jax.jit(self._score), jax.jit(self._step)

    def _score(self, params, h):
        """Every path to a log-probability."""
        return {
            "log_probs": self.call("log_probs", params, h),
            "nll": self.call("nll", params, h, self.targets),
            "loss": self.call("loss", params, h, self.targets, where=self.where),
            "log_prob_at": self.log_prob_at(params, h, jnp.asarray(self.targets)),
            "top_k": self.call("top_k", params, h, VOCAB),
            "entropy": self.call("entropy", params, h),
        }

    def _step(self, params, h, targets, where, share, upstream):
        """(loss, nll) and the gradients, in params and h, of share·objective + Σ upstream·nll."""

        def objective(params, h):
            loss = self.call(
                "loss",
                params,
                h,
                targets,
                where=where,
                z_loss_weight=self.z,
                label_smoothing=self.alpha,
            )
            nll = self.call("nll", params, h, targets, where=where)
            return share * loss.objective + jnp.sum(upstream * nll), (loss, nll)

        gradient, values = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, h)
        return values, gradient

    def dense_gradient(self, share, upstream):
        """The gradients of `step` by the dense formula in float64."""

        def objective(params, h):
            regularised = self.dense(params, h, z=self.z, alpha=self.alpha)[1]
            weights = self.where.reshape(-1), (self.where * upstream).reshape(-1)
            return share * regularised @ weights[0] + self.dense(params, h)[1] @ weights[1]

        with jax.enable_x64(True):
            wide = self.wide(self.params, self.h)
            return jax.device_get(jax.jit(jax.grad(objective, argnums=(0, 1)))(*wide))

    def modules(self, params):
        """(head, table) that hold `params`."""
        return tuple(map(nnx.merge, self._graphs, params))

    def call(self, method, params, h, *args, **keywords):
        """head.method(h, *args, embedding=table, **keywords)."""
        head, table = self.modules(params)
        return getattr(head, method)(h, *args, embedding=table, **keywords)

    def log_prob_at(self, params, h, ids):
        """The contract's log_prob_at on flat states."""
        head, table = self.modules(params)
        h = h.reshape(-1, WIDTH)
        return head.log_prob_at(h, head.normalise(h, table), ids.reshape(-1), table)

    def wide(self, *trees):
        """The same in float64; inside `jax.enable_x64(True)`."""
        return jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64), jnp.float64), trees, is_leaf=None
        )

    # --- the dense reference ---------------------------------------------------------------------------------

    def _dense(self, function, params, h):
        own, table = map(nnx.to_pure_dict, params)
        return function(h.reshape(-1, WIDTH), own, table["weight"], self.options)

    def dense(self, params, h, *, z=0.0, alpha=0.0):
        """[n, V] log-probabilities and [n] objective with smoothing α and z-loss, traceable, in float64."""
        logits = self._dense(self.reference.logits, params, h)
        lse = logsumexp(logits, axis=1)
        log_probs = logits - lse[:, None]
        q = (1 - alpha) * (np.arange(VOCAB) == self.targets.reshape(-1, 1)) + alpha / VOCAB
        objective = -jnp.sum(q * log_probs, axis=1)
        if z:
            penalty = self.reference.z_penalty
            objective += z * (lse**2 if penalty is None else self._dense(penalty, params, h))
        return log_probs, objective

    def dense_log_probs(self):
        """[*batch, V] float64."""
        with jax.enable_x64(True):
            return np.asarray(self.dense(*self.wide(self.params, self.h))[0]).reshape(*BATCH, VOCAB)


def gradient_error(found, wanted):
    """The norm of the difference and of what is wanted, in float64."""
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted), np.linalg.norm(wanted)


_kept = functools.lru_cache(maxsize=64)(Problem)


@pytest.fixture(scope="session")
def make():
    """make(case, token_block=…, row_block=…) → Problem."""
    return _kept


@pytest.fixture(scope="module", autouse=True)
def let_go():
    """Compiled programs of one file are of no use to the next and would fill the memory."""
    yield
    _kept.cache_clear()
    jax.clear_caches()


@pytest.fixture
def problem(case):
    return _kept(case)


@pytest.fixture(scope="session")
def contract():
    """Sizes and tools that the suite shares."""
    return SimpleNamespace(
        vocab=VOCAB,
        width=WIDTH,
        batch=BATCH,
        eps=EPS,
        references=REFERENCES,
        default_case=lambda name, dtype="float32", multiple=8, **changed: Case(
            name,
            dtype,
            multiple,
            tuple({**{k: v[0] for k, v in REFERENCES[name].options.items()}, **changed}.items()),
        ),
        # Every option away from its default at once: what a device or a compiler must cope with.
        loaded_case=lambda name, dtype="float32", multiple=8: Case(
            name, dtype, multiple, tuple((k, v[-1]) for k, v in REFERENCES[name].options.items())
        ),
        error=gradient_error,
    )
