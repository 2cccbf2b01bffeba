"""One folder a question; run from a clone, as `python -m experiments.NAME.run`."""
