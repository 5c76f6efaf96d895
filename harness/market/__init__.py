"""Markets: what was recorded of them, what is learned, what will come, what a plan would pay."""
