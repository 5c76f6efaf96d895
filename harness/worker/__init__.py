"""The process of the user's script: `harness.attach()` and what is beneath it."""
