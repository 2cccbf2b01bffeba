"""`headlab export`."""

import argparse

from headlab.cli.arguments import Command, Overrides, add_run, checkpoint, one_of, path

LAYOUTS = ("llama", "qwen2", "gpt2")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("folder", type=path, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument(
        "--layout",
        **one_of(*LAYOUTS),
        help="default: the first of them that fits the decoder",
    )
    parser.add_argument("--step", default="last", help="a checkpoint, last or best; default: last")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    step = checkpoint(options.step)
    from headlab.pretrained import open_model, save_pretrained

    model, tokenizer, config = open_model(options.workdir, step)
    layout = save_pretrained(options.folder, model, config, tokenizer, layout=options.layout)
    print(f"{options.folder}: {options.workdir} in the layout of {layout}")
    return 0


COMMAND = Command(
    name="export",
    help="a run's model as a folder that transformers loads",
    description="""
    Writes a run's model in float32 as config.json, model.safetensors, tokenizer.json and tokenizer_config.json, which
    transformers loads. Decoders with rotary positions, RMSNorm and SwiGLU are in the Llama layout (Qwen 2's, where
    queries, keys and values alone have biases), those with learned positions, LayerNorm and GELU in that of GPT-2; the
    head is tied or untied. What a layout has no place for is named, and then nothing is written.
    """,
    examples="""
    headlab train --config=configs/llama_tiny.py --workdir=runs/llama
    headlab export --workdir=runs/llama exported/llama
    headlab score --workdir=exported/llama text.txt
    """,
    add_arguments=_add_arguments,
    run=_run,
)
