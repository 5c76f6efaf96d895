"""Side jobs beside a run: a command for each committed snapshot (`harness watch`)."""
