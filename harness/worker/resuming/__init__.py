"""The start of a world: from a snapshot, or from what survivors of the last world keep."""
