"""Snapshots as safetensors files and in published layouts."""
