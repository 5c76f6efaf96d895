"""Side jobs of a run: a command for each committed snapshot (`harness snapshots watch`)."""
