"""Proofs that a run's records hold: samples, snapshots, signatures, bills."""
