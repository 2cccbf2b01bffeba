"""Models in the Hugging Face layout: read from safetensors, never from a pickle, and written."""

from headlab.pretrained.head import PretrainedHead, load_head
from headlab.pretrained.llama import Llama, load_llama, save_llama
from headlab.pretrained.opening import OpenModel, is_pretrained, open_model, restore

__all__ = [
    "Llama",
    "OpenModel",
    "PretrainedHead",
    "is_pretrained",
    "load_head",
    "load_llama",
    "open_model",
    "restore",
    "save_llama",
]
