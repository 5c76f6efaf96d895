"""The `harness` command: the only place that builds the real world (clock, cloud, randomness,
store)."""
