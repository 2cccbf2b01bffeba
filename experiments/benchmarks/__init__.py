"""How fast headlab is, beside what one would write without it."""
