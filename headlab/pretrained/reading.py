"""Whole decoders from folders in the Hugging Face layout: config.json, safetensors and tokenizer.json."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from headlab import models
from headlab.costs import read_config
from headlab.data import Tokenizer
from headlab.errors import UsageError
from headlab.pretrained.described import read_decoder_config
from headlab.pretrained.folder import TensorFolder
from headlab.pretrained.layouts import HEAD, Layout, Tensor, tensors

_SHOWN = 5  # names that an error lists


class OpenModel(NamedTuple):
    """A decoder with what it needs to read text."""

    model: models.Decoder
    tokenizer: Tokenizer
    config: ConfigDict  # of the model as it is: config.head.name is the head that it has


def load_pretrained(folder: str | os.PathLike[str], *, shards: int = 1) -> OpenModel:
    """The decoder of a Llama, SmolLM2, Qwen 2 or GPT-2 folder, in float32, with its tokenizer.

    It computes what `transformers` does, in headlab's own decoder. `tokenizer.start_id` is the config's bos_token_id;
    generated text ends at the tokenizer's separator, which need not be every eos_token_id of a model for dialogues.
    Rows are padded to a multiple of 128 and of `shards`, with zeros that are no tokens.
    Where the table has more rows than the tokenizer has ids, the model has as many tokens as rows.

    Raises:
      UsageError: the config has something that headlab's decoder has not; there are no safetensors; a tensor is
        missing, unknown, of another shape than the config says or not of floating-point numbers; config.json says that
        the head is tied and a head that differs from the embedding is stored; there is no tokenizer.json that can be
        used, or it has more ids than the table has rows.
      HeadlabError: a file is damaged.
    """
    folder = Path(folder)
    layout, config = read_decoder_config(folder)
    size, tied = config.data.vocab_size, config.head.name == "tied"
    tokenizer = _tokenizer(folder, size)
    files = TensorFolder(folder)
    prefix = "" if layout.embedding in files.names() else layout.prefix
    listed = {
        tensor.name if tensor.name == HEAD else prefix + tensor.name: tensor
        for tensor in tensors(layout, config.model, tied=tied)
    }
    _check_names(layout, folder, files.names(), set(listed), tied=tied)
    graph, params, constants = models.split(
        nnx.eval_shape(lambda: models.build(config, size, shards=shards))
    )
    for name, tensor in listed.items():
        _put(params, tensor, files.read_float(name), layout, f"{name} in {folder}", size)
    if tied and HEAD in files.names():
        files.check_tied(HEAD, prefix + layout.embedding)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    return OpenModel(models.merge(graph, params, constants), tokenizer, config)


def _tokenizer(folder: Path, size: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"cannot read {path} ({problem}); a tokenizer.json is needed") from None
    tokenizer = Tokenizer(text, str(path), start_id=read_config(folder).get("bos_token_id"))
    if tokenizer.vocab_size > size:
        raise UsageError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}; the model has {size} tokens"
        )
    return tokenizer


def _check_names(
    layout: Layout, folder: Path, there: set[str], wanted: set[str], *, tied: bool
) -> None:
    known = {name for name in there if re.search(layout.buffers, name)}
    known |= wanted | ({HEAD} if tied else set())
    for verb, found in (("lacks", wanted - there), ("has the unknown", there - known)):
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise UsageError(f"{folder} {verb} {', '.join(sorted(found)[:_SHOWN])}{more}")


def _put(
    params: Any, tensor: Tensor, array: np.ndarray, layout: Layout, said: str, size: int
) -> None:
    """Puts a tensor's parts in the place of the shapes that stand at their paths in `params`."""
    shapes = [_at(params, path).shape for path in tensor.paths]
    widths = [shape[-1] for shape in shapes]
    whole = (size if tensor.kind == "rows" else shapes[0][0], *shapes[0][1:-1], sum(widths))
    whole = whole if len(shapes[0]) > 1 else (sum(widths),)
    turned = tensor.kind == "kernel" and layout.transposed
    if array.shape != (whole[::-1] if turned else whole):
        raise UsageError(
            f"{said} is {array.shape}; its config.json says {whole[::-1] if turned else whole}"
        )
    array = array.T if turned else array
    if tensor.kind == "rows":
        array = np.pad(array, ((0, shapes[0][0] - size), (0, 0)))
    parts = np.split(array, np.cumsum(widths)[:-1], axis=-1)
    for path, part in zip(tensor.paths, parts, strict=True):
        _at(params, path[:-1])[path[-1]] = jnp.asarray(part)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
