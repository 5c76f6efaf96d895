"""The worker: the process of the user's script, with `harness.attach()` and its implementation."""
