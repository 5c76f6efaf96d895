"""The adapter of torchtitan; `overrides.py` has what a script may ask for by name."""
