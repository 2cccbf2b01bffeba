"""Models in the Hugging Face layout: read from safetensors, never from a pickle, and written."""

from headlab.pretrained.head import PretrainedHead, load_head
from headlab.pretrained.opening import is_pretrained, open_model, restore
from headlab.pretrained.reading import OpenModel, load_pretrained
from headlab.pretrained.resizing import resize_vocabulary
from headlab.pretrained.writing import save_pretrained

__all__ = [
    "OpenModel",
    "PretrainedHead",
    "is_pretrained",
    "load_head",
    "load_pretrained",
    "open_model",
    "resize_vocabulary",
    "restore",
    "save_pretrained",
]
