"""The log of facts, folded once: attempts, worlds, speed, and the bill. Pure."""
