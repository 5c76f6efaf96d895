"""The process that uploads a node's snapshots, and its clients."""
