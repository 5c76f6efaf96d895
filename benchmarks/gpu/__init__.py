"""`make gpu`: everything that only a GPU can show, in one command of ten minutes. docs/GPU.md has
the figures, and how to make them for other hardware."""
