"""A run's model as an evaluation harness asks for it; `headlab.scoring.lm_eval` tells lm-evaluation-harness of it.

This class needs no harness: requests are what has `args`. Scores are those of `choose`, text that of `generate_text`.
"""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headlab import __version__, models, sharding
from headlab.data.progress import track
from headlab.errors import UsageError
from headlab.pretrained import restore
from headlab.scoring.choices import Candidate, choose_pairs, pair_ids
from headlab.scoring.requests import fitted, generation, rolling
from headlab.scoring.text import generate_text

_logger = logging.getLogger(__name__)
_LONGEST_ANSWER = 256  # tokens of an answer where neither the task nor the command line says
_NO_TEMPLATE = "headlab's models are trained on plain text and have no chat template; leave --apply_chat_template out"
_BATCHES = 16  # whose results are handed to the harness's cache at once


class HarnessModel:
    """`loglikelihood`, `loglikelihood_rolling` and `generate_until` of one model."""

    #: takes what is to be kept of partial results: cache_hook.add_partial(method, arguments, result)
    cache_hook: Any = None

    def __init__(
        self,
        workdir: str,
        *,
        batch_size: int | str = 8,
        add_bos_token: bool | None = None,
        max_length: int | None = None,
        max_gen_toks: int | None = None,
        step: int | str = "last",
        shards: int = 1,
        seed: int = 0,
    ):
        """
        Args:
          workdir: a run directory, or a folder in the Hugging Face layout.
          batch_size: texts at once, at least 1.
          add_bos_token: put the tokenizer's start before every context, not in place of an empty one alone. None: where
            it isn't the separator, as in Llama's folders, whose tokenizers do so under `transformers`.
          max_length: tokens that the model reads at most, from 1 to its own `max_length`, the default. Longer contexts
            lose tokens on the left, with a warning.
          max_gen_toks: new tokens where a task says nothing; None is 256, or half of `max_length` where that is less.
          step: the checkpoint: "last", "best" or a number.
          shards: devices that share the rows of the vocabulary in scoring; text is generated on one.
          seed: of sampling, in [0, 2**31).

        Raises UsageError for values out of their range, and the errors of `open_model`.
        """
        super().__init__()  # the harness's own base class, where there is one
        self.batch_size = _whole("batch_size", batch_size, 1)
        shards = _whole("shards", shards, 1)
        self._mesh = sharding.make_mesh(1, shards)
        restored = restore(workdir, _step(step), shards=shards)
        self.model, self._tokenizer = restored.model, restored.tokenizer
        if self._tokenizer.vocab_size > self.model.head.vocab_size:
            raise UsageError(
                f"the tokenizer of {workdir} has ids up to {self._tokenizer.vocab_size - 1}; the model has "
                f"{self.model.head.vocab_size} tokens: give the tokenizer that it was trained with"
            )
        if add_bos_token not in (None, True, False):
            raise UsageError(f"add_bos_token is {add_bos_token!r}; it must be true or false")
        own_start = self._tokenizer.start_id != self._tokenizer.separator_id
        self._add_start = own_start if add_bos_token is None else add_bos_token
        longest = self.model.max_length
        self.max_length = _whole(
            "max_length", longest if max_length is None else max_length, 1, longest
        )
        usual = min(_LONGEST_ANSWER, max(self.max_length // 2, 1))
        self.max_gen_toks = _whole(
            "max_gen_toks", usual if max_gen_toks is None else max_gen_toks, 1
        )
        self._seed = _whole("seed", seed, 0, 2**31 - 1)
        self._info = {
            "headlab_version": __version__,
            "headlab_workdir": str(workdir),
            "headlab_step": restored.step,
            "headlab_head": restored.head,
            "model_num_parameters": models.count_parameters(self.model)["total"],
        }

    # --- what a harness calls ------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(Σ log p of the continuation in nats, whether greedy decoding gives it) of each (context, continuation).

        Tokenized as `pair_ids` says; contexts that the model can't read whole lose tokens on the left.
        """
        asked = [request.args for request in requests]
        for context, continuation in asked:
            if not continuation:
                raise UsageError(
                    f"a continuation of the context {context[-40:]!r} is empty; it must have at least one character"
                )
        pairs = self._fitted(pair_ids(self._tokenizer, asked, add_start=self._add_start))

        def done(number: int, candidate: Candidate) -> tuple[float, bool]:
            result = (candidate.log_prob, candidate.is_greedy)
            self._keep("loglikelihood", asked[number], result)
            return result

        return self._scored(pairs, done, "loglikelihood", disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Σ log p of all tokens of each text in nats: the first after the start, in the harness's windows."""
        asked = [request.args for request in requests]
        start, windows, owners = self._tokenizer.start_id, [], []
        for number, (text,) in enumerate(asked):
            if not text:
                raise UsageError(
                    f"text {number} is empty; a text to be scored has at least one character"
                )
            own = list(rolling(self._tokenizer.encode(text), start, self.max_length))
            windows += own
            owners += [number] * len(own)
        found = self._scored(windows, lambda _, c: c.log_prob, "rolling", disable_tqdm)
        totals = [0.0] * len(asked)
        for owner, log_prob in zip(owners, found, strict=True):
            totals[owner] += log_prob
        for arguments, total in zip(asked, totals, strict=True):
            self._keep("loglikelihood_rolling", arguments, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each (context, generation arguments), up to a stop string or the document's end.

        The context stands as it is, or after the start as `add_bos_token` says. Sampled texts depend on the
        seed, the order of the requests and the batch size.
        """
        asked = [(request.args[0], dict(request.args[1])) for request in requests]
        plans = [generation(arguments, self.max_gen_toks) for _, arguments in asked]
        for plan in plans:
            if plan.max_new_tokens >= self.max_length:
                raise UsageError(
                    f"max_gen_toks is {plan.max_new_tokens}; with at least one token of context it must be below "
                    f"{self.max_length}, the max_length of the model: give a smaller one with --gen_kwargs"
                )
        start = [self._tokenizer.start_id]
        ids = self._tokenizer.encode_batch([context for context, _ in asked])
        ids = [start + own if self._add_start or not own else own for own in ids]
        prompts = []
        for own, plan in zip(ids, plans, strict=True):
            room = self.max_length - plan.max_new_tokens
            prompts.append(own[-room:])
        self._warn(sum(len(p) < len(own) for p, own in zip(prompts, ids, strict=True)), len(asked))
        # alike plans together, and of these the longest prompts first: few shapes, and no surprise at the end
        order = sorted(
            range(len(asked)), key=lambda i: (repr(plans[i]), -len(prompts[i]), prompts[i], i)
        )
        batches = [
            batch
            for _, alike in itertools.groupby(order, key=lambda i: plans[i])
            for batch in _batched(alike, self.batch_size)
        ]
        texts = [""] * len(asked)
        for turn, batch in enumerate(
            track(batches, "generating", total=len(batches), enabled=not disable_tqdm)
        ):
            plan = plans[batch[0]]
            made = generate_text(
                self.model,
                self._tokenizer,
                [prompts[i] for i in batch],
                rules=plan.rules,
                max_new_tokens=plan.max_new_tokens,
                stop=plan.stop,
                seed=(self._seed + turn) % 2**31,
            )
            for i, [continuation] in zip(batch, made, strict=True):
                texts[i] = continuation.text
                self._keep("generate_until", requests[i].args, continuation.text)
        return texts

    @property
    def tokenizer_name(self) -> str:
        """What tells the harness's caches of requests apart."""
        return f"headlab-{self._tokenizer.fingerprint}"

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results beside its own configuration."""
        return dict(self._info)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """None; UsageError where a template is asked for."""
        if chat_template:
            raise UsageError(_NO_TEMPLATE)
        return None

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """UsageError: there is no template."""
        raise UsageError(_NO_TEMPLATE)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Any:
        """The model of the harness's `--model_args` as a dict, and of its own flags.

        A `batch_size` among the arguments goes before --batch_size. JAX chooses the device (JAX_PLATFORMS), so that
        --device, which the harness always gives, says nothing here; nor does --max_batch_size, which is of "auto".
        """
        accepted = list(inspect.signature(HarnessModel).parameters)
        for name in arg_dict:
            if name not in accepted:
                raise UsageError(
                    f"the model argument {name}={arg_dict[name]!r} is unknown to headlab; it has {', '.join(accepted)}"
                )
        if not arg_dict.get("workdir"):
            raise UsageError("no run is given; give one with --model_args workdir=RUN")
        size = (additional_config or {}).get("batch_size")
        given = {} if size is None else {"batch_size": size}
        return cls(**{**given, **arg_dict})

    # --- how ------------------------------------------------------------------------------------------------------

    def _scored(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        done: Callable[[int, Candidate], Any],
        what: str,
        quiet: bool,
    ) -> list[Any]:
        """done(number, what `choose` says) of every pair; the longest first, some batches at a time."""
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        parts = list(_batched(order, self.batch_size * _BATCHES))
        results: list[Any] = [None] * len(pairs)
        for part in track(parts, what, total=len(parts), enabled=not quiet):
            found = choose_pairs(
                self.model,
                [pairs[i] for i in part],
                batch_size=self.batch_size,
                mesh=self._mesh,
            )
            for i, candidate in zip(part, found, strict=True):
                results[i] = done(i, candidate)
        return results

    def _fitted(self, pairs):
        """The pairs, contexts cut on the left to what the model reads."""
        cut = [fitted(before, ids, self.max_length) for before, ids in pairs]
        shorter = sum(len(new[0]) < len(old[0]) for new, old in zip(cut, pairs, strict=True))
        self._warn(shorter, len(pairs))
        return cut

    def _warn(self, shortened: int, requests: int) -> None:
        if shortened:
            _logger.warning(
                "%d of %d contexts do not fit the model's max_length of %d: tokens were cut off on their left",
                shortened,
                requests,
                self.max_length,
            )

    def _keep(self, method: str, arguments: Any, result: Any) -> None:
        if self.cache_hook is not None:
            self.cache_hook.add_partial(method, arguments, result)


def _batched(items: Iterable[int], size: int) -> Iterable[list[int]]:
    remaining = iter(items)
    return iter(lambda: list(itertools.islice(remaining, size)), [])


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an integer in its range; UsageError naming it."""
    text = str(value)
    if text.isdecimal() and int(text) >= least and (most is None or int(text) <= most):
        return int(text)
    allowed = f"at least {least}" if most is None else f"in {least} … {most}"
    raise UsageError(f"{name} is {value!r}; it must be an integer {allowed}")


def _step(step: int | str) -> Any:
    if step in ("last", "best"):
        return step
    return _whole("step", step, 0)
