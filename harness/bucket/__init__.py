"""The contents of a run's bucket, and their readers and writers."""
