"""Leaves the modules that import PyTorch to the tests that need it, so that collecting works without it."""

collect_ignore = [
    "make_goldens.py",
    "make_transformers_goldens.py",
    "torch_reference.py",
    "transformers_reference.py",
]
