"""Preemption notices: one file per cloud's metadata service."""
