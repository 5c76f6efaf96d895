"""Wires between the processes of one machine."""
