"""The recovery loop on a virtual clock, in worlds made from seeds."""
