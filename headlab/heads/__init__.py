"""Output heads by name. A new head is one new file and one line in `_REGISTRY`; every shared test then runs on it."""

import difflib
import importlib
import inspect
from typing import Any

from headlab.errors import UsageError
from headlab.heads.base import Head, Loss, Segment

_REGISTRY = {
    "tied": "headlab.heads.linear:Tied",
    "untied": "headlab.heads.linear:Untied",
    "low_rank": "headlab.heads.low_rank:LowRank",
    "adaptive": "headlab.heads.adaptive:Adaptive",
    "mixture_of_softmaxes": "headlab.heads.mixtures:MixtureOfSoftmaxes",
    "mixture_of_contexts": "headlab.heads.mixtures:MixtureOfContexts",
    "sigsoftmax": "headlab.heads.sigsoftmax:SigSoftmax",
    "mixture_of_sigsoftmaxes": "headlab.heads.mixtures:MixtureOfSigSoftmaxes",
    "mixtape": "headlab.heads.mixtape:Mixtape",
}

_REGISTERED: dict[str, type[Head]] = {}  # by `register`

# What the model gives to every head; all else in a constructor is an option of the config's `head` section.
_GIVEN = ("self", "vocab_size", "d_model", "rngs", "vocab_multiple", "init_scale", "token_counts")


def names() -> tuple[str, ...]:
    """All registered names."""
    return (*_REGISTRY, *_REGISTERED)


def get(name: str) -> type[Head]:
    """The class registered under `name`; UsageError with the nearest name where there is none.

    >>> get("sigsoftmax").__name__
    'SigSoftmax'
    >>> get("teid")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headlab.errors.UsageError: There is no head 'teid'. Did you mean 'tied'? Heads: tied, untied, ...
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"There is no head {name!r}.{hint} Heads: {', '.join(names())}.")
    module, _, attribute = _REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def register(name: str, cls: type[Head]) -> None:
    """Lets `cls` be built, configured and trained under `name` in this process, such as from a notebook or config file.

    A head that is to stay in headlab is one line in `_REGISTRY` instead.

    Raises:
      UsageError: the name is a built-in head's, or cannot stand in a config; or `cls` is no subclass of `Head`.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Head)):
        raise UsageError(f"{cls!r} is not a subclass of headlab.heads.Head.")
    if name in _REGISTRY:
        raise UsageError(f"There is a head {name!r} in headlab; give the new one another name.")
    if not name.isidentifier():
        raise UsageError(f"A head cannot be called {name!r}; take letters, digits and underscores.")
    _REGISTERED[name] = cls  # again, when a notebook's cell is run again


def options(name: str) -> dict[str, inspect.Parameter]:
    """The keyword options of a head's constructor, with their annotations and defaults.

    >>> list(options("sigsoftmax"))
    ['tied', 'bias', 'softcap', 'logit_scale', 'logits_dtype']
    """
    parameters = inspect.signature(get(name).__init__, eval_str=True).parameters
    return {key: p for key, p in parameters.items() if key not in _GIVEN}


def build(name: str, *, sum_blocks: int | None = None, **arguments: Any) -> Head:
    """`build("untied", vocab_size=V, d_model=d, rngs=nnx.Rngs(0), **options)`.

    With `sum_blocks` sums over the vocabulary follow a tree over so many blocks of rows, a power of two that divides
    `vocab_multiple`: their bits then do not depend on the number of shards (see `headlab.ops.softmax_tree`).
    `token_counts` is handed on only to heads whose constructor asks for it.

    >>> from flax import nnx
    >>> head = build("low_rank", vocab_size=100, d_model=16, rank=4, rngs=nnx.Rngs(0))
    >>> head.rank_bound(), head.cost("training").parameters  # 4 + 1, (100 + 16)·4
    (5, 464)
    """
    cls = get(name)
    accepted = inspect.signature(cls.__init__).parameters
    if "token_counts" not in accepted:
        arguments.pop("token_counts", None)
    unknown = sorted(set(arguments) - set(accepted))
    if unknown:
        near = difflib.get_close_matches(unknown[0], options(name), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"The head {name!r} has no option {unknown[0]!r}.{hint} Options: {', '.join(options(name)) or 'none'}."
        )
    head = cls(**arguments)
    if sum_blocks is not None:
        head.sum_in_blocks(sum_blocks)
    return head


__all__ = ["Head", "Loss", "Segment", "build", "get", "names", "options", "register"]
