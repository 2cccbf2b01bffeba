"""What is read off a model's distribution: here, text that goes on from a prompt."""

from headlab.scoring.decoding import generate, greedy, sample, with_temperature

__all__ = ["generate", "greedy", "sample", "with_temperature"]
