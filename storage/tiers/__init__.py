"""Nearer copies of snapshots: memory, disk and peers."""
