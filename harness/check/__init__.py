"""`harness check`: a script is run, interrupted and compared."""
