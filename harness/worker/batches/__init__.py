"""The samples that a step takes, and their reading."""
