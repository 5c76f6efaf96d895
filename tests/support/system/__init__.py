"""A whole run in one process: every seat's real code, under one virtual clock."""
