"""Snapshots: written in parts, committed by a manifest, restored, retained."""
