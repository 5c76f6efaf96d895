"""`make gpu`: everything that only a GPU can show, in one command of ten minutes.
docs/design/GPU.md has the figures, and how to make them for other hardware."""
