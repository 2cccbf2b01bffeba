"""headlab as a model of EleutherAI's lm-evaluation-harness (Gao et al. 2021); importing it needs the extra `lm_eval`.

Importing registers the model "headlab" with the harness, for `lm_eval.simple_evaluate(model="headlab", …)`. The harness
looks for models in no other place, so that on the command line `headlab lm-eval` stands for `lm_eval`: it imports this
and hands its arguments on.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 (the harness's own, which it adds by itself only while it knows none)
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string

from headlab.scoring.harness import HarnessModel


@register_model("headlab")
class HeadlabLM(HarnessModel, LM):
    """See `HarnessModel`, whose arguments `--model_args` takes."""

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HeadlabLM":
        """As `create_from_arg_obj`, of arguments such as "workdir=runs/tied,step=best"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


def main(arguments: Sequence[str]) -> None:
    """The harness's command line, which knows the model "headlab" by now."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
