"""The process that sends a node's snapshots, and who talks to it."""
