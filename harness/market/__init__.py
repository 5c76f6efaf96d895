"""Markets: what was recorded of them, what is learned, what will come, and what a plan would pay."""
