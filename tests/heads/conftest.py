"""The tools of the contract suite; its cases: contract_cases.py; the dense formula of each head: reference_heads.py."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _pytest.mark.expression import Expression  # the meaning of -m
from contract_cases import (
    QUICK,
    Case,
    case_of,
    cases_of_all_heads,
    default_case,
    is_slow,
    loaded_case,
    one_by_one,
)
from flax import nnx
from jax.scipy.special import logsumexp
from reference_heads import OURS, REFERENCES, VOCAB, WIDTH

from headlab import heads, sharding
from headlab.embeddings import Constant, padded_size

BATCH = (3, 4)
EPS = float(np.finfo(np.float32).eps)
BF16 = 2.0**-8  # unit round-off


def pytest_generate_tests(metafunc):
    """Gives `case` to tests of every case, and `name` to tests of every registered head.

    With the mark `in_turn(arguments, values)` each head gets one of the values, heads taking turns, and the rest of the
    product has the mark `full`. Tests with that mark, more than all others, are made only where `-m` selects them. With
    the mark `quick(*names)` those of headlab's own heads that it does not name are `slow`; it means `QUICK` where it
    names none.
    """
    selected = Expression.compile(metafunc.config.option.markexpr or "full")
    full = selected.evaluate(lambda name, **_: name == "full")
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases_of_all_heads(full))
        return
    if "name" not in metafunc.fixturenames:
        return
    marked = metafunc.definition.get_closest_marker("quick")
    quick = OURS if marked is None else marked.args or QUICK
    in_turn = metafunc.definition.get_closest_marker("in_turn")
    arguments, values = ((), [()]) if in_turn is None else in_turn.args
    metafunc.parametrize(
        ("name", *arguments),
        [
            pytest.param(
                name,
                *value,
                marks=[
                    *[pytest.mark.full] * ((i - j) % len(values) > 0),
                    *[pytest.mark.slow] * is_slow(name, quick),
                ],
                id="-".join(map(str, (name, *value))),
            )
            for i, name in enumerate(heads.names())
            for j, value in enumerate(values)
            if full or (i - j) % len(values) == 0
        ],
    )


class Problem:
    """A head of a case with parameters drawn afresh, some states and targets, and the dense reference of both.

    Parameters (padding rows too, where a leak would show) and states are representable in bfloat16, so that products
    are exact in every dtype. Blocks are of 4 tokens and 4 rows: 11 rows leave a remainder, 16 a block of padding alone.
    What is compiled is kept for the tests that share a problem; none of them changes it.
    """

    def __init__(self, case: Case, *, token_block=4, row_block="of the case", seed=0):
        row_block = case.row_block if row_block == "of the case" else row_block
        self.case, self.options = case, dict(case.options)
        self.reference = REFERENCES[case.name]

        def build():
            modules = head, _ = _modules(
                case.name, VOCAB, WIDTH, vocab_multiple=case.vocab_multiple, **self.options
            )
            head.block_rows = row_block
            if hasattr(head, "spec"):  # the fused walk of linear heads has blocks of its own
                head.spec = head.spec._replace(token_block=token_block, vocab_block=row_block)
            return modules

        head, _ = modules = nnx.eval_shape(build)
        self._graphs, shapes, _ = _split(modules)
        # the parameters that `build` would draw are not asked for, and so not computed
        self._constants = jax.jit(lambda: _split(build())[2])()
        rng = np.random.default_rng(seed)

        def draw(shape):
            return np.asarray(rng.normal(size=shape) * 0.8, ml_dtypes.bfloat16).astype(np.float32)

        self.params = jax.tree.map(lambda a: jnp.asarray(draw(a.shape)), shapes)
        self.ties_to = head.ties_to
        self.h = jnp.asarray(draw((*BATCH, WIDTH)) * 2, case.dtype)
        self.targets = rng.integers(0, VOCAB, BATCH).astype(np.int32)
        self.where = np.ones(BATCH, bool)
        self.where[0, 2] = self.where[2, 3] = self.where[1, 0] = False
        self.z, self.alpha = 0.05, 0.0 if head.smoothing_refused else 0.1
        largest = float(np.abs(self.dense_log_probs).max())
        # A value is a sum of d products, mapped, shifted and normalised: about d + 8 roundings of numbers no larger
        # than twice the largest log-probability.
        self.value_tolerance = EPS * (WIDTH + 8) * 2 * largest
        if case.dtype == "bfloat16":
            # A rounded factor moves a product by 2⁻⁸ of Σ|factor·weight|, which is of the size of the logits' spread.
            self.value_tolerance += self.reference.roundings * BF16 * 2 * largest
        # A gradient is a sum of products of (p − [target]), relative error as above, with a state or a weight; in
        # bfloat16 that factor and the result are rounded once each. Relative to the norm; the sum may cancel to half.
        roundings = 0 if case.dtype == "float32" else 2 * BF16
        self.gradient_tolerance = 2 * (roundings + self.value_tolerance)

        self.score, self.step = jax.jit(self._score), jax.jit(self._step)
        self.report = jax.jit(
            lambda params, h, ids, k: self.call("token_report", params, h, ids, k), static_argnums=3
        )
        self.dense_step = jax.jit(self._dense_step)

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
        with jax.enable_x64(True):
            wide = self.wide(self.params, self.h)
            return jax.device_get(self.dense_step(*wide, share, upstream))

    def _dense_step(self, params, h, share, upstream):
        def objective(params, h):
            regularised = self.dense(params, h, z=self.z, alpha=self.alpha)[1]
            weights = self.where.reshape(-1), (self.where * upstream).reshape(-1)
            return share * regularised @ weights[0] + self.dense(params, h)[1] @ weights[1]

        return jax.grad(objective, argnums=(0, 1))(params, h)

    def token_rows(self):
        """[(path, ids of the tokens whose rows the leaf holds, or None)] in the order of the leaves of `params`."""
        head, _ = self.modules(self.params)
        return _token_rows(self.case.name, head, self.params, self.case.vocab_multiple)

    def with_rows(self, change):
        """`params` with change(leaf, ids) in place of every leaf that holds rows of tokens."""
        leaves, tree = jax.tree.flatten(self.params)
        changed = [
            leaf if ids is None else change(leaf, ids)
            for leaf, (_, ids) in zip(leaves, self.token_rows(), strict=True)
        ]
        return jax.tree.unflatten(tree, changed)

    def specs(self):
        """Where the parameters live on a mesh, a tree like `params`."""
        pure = {
            k: nnx.to_pure_dict(p) for k, p in zip(("head", "embedding"), self.params, strict=True)
        }
        found = [sharding.param_specs({key: pure[key]}) for key in ("head", "embedding")]
        return jax.tree.unflatten(jax.tree.structure(self.params), jax.tree.leaves(found))

    def modules(self, params):
        """(head, embedding) that hold `params`."""
        return tuple(map(nnx.merge, self._graphs, params, self._constants))

    def call(self, method, params, h, *args, **keywords):
        """head.method(h, *args, embedding=embedding, **keywords)."""
        head, embedding = self.modules(params)
        return getattr(head, method)(h, *args, embedding=embedding, **keywords)

    def log_prob_at(self, params, h, ids):
        """The contract's log_prob_at on flat states."""
        head, embedding = self.modules(params)
        h = h.reshape(-1, WIDTH)
        return head.log_prob_at(h, head.normalise(h, embedding), ids.reshape(-1), embedding)

    def segment_ids(self):
        """The token ids of all rows of each segment, in the head's own order."""

        @jax.jit
        def ids(params, h):
            head, embedding = self.modules(params)
            norm = head.normalise(h, embedding)
            return [
                head.log_prob_block(h, norm, segment, 0, segment.size, embedding)[1]
                for segment in head.segments()
            ]

        return [np.asarray(found) for found in ids(self.params, self.h.reshape(-1, WIDTH))]

    def wide(self, *trees):
        """The same in float64; inside `jax.enable_x64(True)`."""
        return jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64), jnp.float64), trees, is_leaf=None
        )

    # --- the dense reference ---------------------------------------------------------------------------------

    def _dense(self, function, params, h, *more):
        own, embedding = map(nnx.to_pure_dict, params)
        return function(h.reshape(-1, WIDTH), own, embedding, self.options, *more)

    def dense(self, params, h, *, z=0.0, alpha=0.0):
        """[n, V] log-probabilities and [n] objective with smoothing α and z-loss, traceable, in float64."""
        logits = self._dense(self.reference.logits, params, h)
        lse = logsumexp(logits, axis=1)
        log_probs = logits - lse[:, None]
        q = (1 - alpha) * (np.arange(VOCAB) == self.targets.reshape(-1, 1)) + alpha / VOCAB
        objective = -jnp.sum(q * log_probs, axis=1)
        if z:
            penalty, targets = self.reference.z_penalty, jnp.asarray(self.targets.reshape(-1))
            objective += z * (
                lse**2 if penalty is None else self._dense(penalty, params, h, targets)
            )
        return log_probs, objective

    @functools.cached_property
    def _dense_values(self):
        with jax.enable_x64(True):
            dense = jax.jit(lambda params, h: self.dense(params, h, z=self.z, alpha=self.alpha))
            return jax.device_get(dense(*self.wide(self.params, self.h)))

    @property
    def dense_log_probs(self):
        """[*batch, V] float64."""
        return self._dense_values[0].reshape(*BATCH, VOCAB)

    @property
    def dense_objective(self):
        """[n] float64, with z-loss and smoothing."""
        return self._dense_values[1]


def _token_rows(name, head, params, vocab_multiple):
    """For each leaf of (head's, embedding's) parameters the ids of the tokens whose rows it holds, or None.

    Rows of a leaf beyond its ids are padding.
    """
    rows = padded_size(head.vocab_size, vocab_multiple)
    of_head = REFERENCES[name].row_ids
    found = []
    for number, part in enumerate(params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(part)):
            path = jax.tree_util.keystr(path, simple=True, separator="/")
            plain = np.arange(head.vocab_size) if leaf.shape[:1] == (rows,) else None
            table = number == 1 and path == "weight"
            ids = of_head(head, path) if of_head and not table else plain
            found.append((path, None if ids is None else np.asarray(ids)))
    return found


def _modules(name, vocab, width, *, vocab_multiple=1, init_scale=0.25, **options):
    """(head, embedding) of a model, with their initial parameters."""
    given = dict(
        vocab_size=vocab,
        d_model=width,
        vocab_multiple=vocab_multiple,
        init_scale=init_scale,
        token_counts=np.arange(vocab, 0, -1),
        **options,
    )
    head = heads.build(name, rngs=nnx.Rngs(0), **given)
    return head, heads.get(name).input_embedding(rngs=nnx.Rngs(1), **given)


def _split(modules):
    """(graphs, parameters, constants) of some modules."""
    parts = (nnx.split(module, nnx.Param, Constant) for module in modules)
    return tuple(zip(*parts, strict=True))


def _initial(*sizes, **options):
    """(graphs, initial parameters, constants) of `_modules`, from one program."""
    graphs, *_ = _split(nnx.eval_shape(lambda: _modules(*sizes, **options)))
    return graphs, *jax.jit(lambda: _split(_modules(*sizes, **options))[1:])()


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


def _head_of(item):
    """The head that a test of the suite is about; None for other tests."""
    if item.path.parent != Path(__file__).parent:
        return None
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = parameters.get("case")
    return case.name if isinstance(case, Case) else parameters.get("name")


def pytest_collection_modifyitems(items):
    """All tests of one head one after another and in one process: they share what was compiled."""
    for item in items:
        if (head := _head_of(item)) and item.get_closest_marker("optimised") is None:
            item.add_marker(pytest.mark.xdist_group(f"head {head}"))
    items.sort(key=lambda item: _head_of(item) or "")


_last: dict[str, str | None] = {"head": None}


@pytest.fixture(autouse=True)
def let_go_of_problems(request):
    """Those of one head are of no use to the next, and would fill the memory."""
    head = _head_of(request.node)
    if head != _last["head"]:
        _kept.cache_clear()
        _last["head"] = head


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
        modules=_modules,
        fixed=lambda name: {
            key: values[0] for key, values in REFERENCES[name].options.items() if len(values) == 1
        },
        token_rows=_token_rows,
        split=_split,
        initial=_initial,
        default_case=default_case,
        loaded_case=loaded_case,
        case_of=case_of,
        one_by_one=one_by_one,
        error=gradient_error,
    )
