"""Drills: every fault in every phase, with real processes."""
