"""headlab: train small language models that differ in their output head, and compare them honestly.

Importing this package imports nothing else; take what you need from its packages (`headlab.heads`,
`headlab.models`, `headlab.training`, …).
"""

__version__ = "0.1.0"
