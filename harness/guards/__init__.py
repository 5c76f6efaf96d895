"""Guards against bad steps: updates that are clipped or left out, and alarms for the loss."""
