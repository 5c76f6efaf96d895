"""Tensors on one side, parts of snapshots on the other. Needs torch."""
