"""Stand-in heads with every kind of option, and a short way to a changed configuration."""

import inspect
import sys
import types
from typing import Literal

import pytest

from headlab import config as cfg
from headlab.errors import UsageError


class _Linear:
    def __init__(
        self,
        *,
        bias: bool = False,
        softcap: float | None = None,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ): ...


class _Mixture:
    def __init__(
        self, *, n_experts: int, cutoffs: tuple[int, ...] | str = "auto", prior: str = "learned"
    ): ...


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    """Three heads whose options have every kind of type, one of them without a default."""
    classes = {"tied": _Linear, "untied": _Linear, "mixture": _Mixture}
    stand_in = types.ModuleType("headlab.heads")
    stand_in.names = lambda: tuple(classes)
    stand_in.options = lambda name: dict(inspect.signature(classes[name]).parameters)
    monkeypatch.setitem(sys.modules, "headlab.heads", stand_in)


@pytest.fixture
def changed():
    """The default configuration with `section__name=value` changed."""

    def change(**values):
        config = cfg.default_config()
        for key, value in values.items():
            section, name = key.split("__")
            config[section][name] = value
        return config

    return change


@pytest.fixture
def refusal():
    """The message with which a configuration is refused."""

    def refuse(config):
        with pytest.raises(UsageError) as caught:
            cfg.resolve(config)
        return str(caught.value)

    return refuse
