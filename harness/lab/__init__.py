"""Proofs of the rest: the simulation, the drill, kills, replay."""
