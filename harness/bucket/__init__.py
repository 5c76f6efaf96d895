"""What lies in the bucket of a run, and how it is read and written."""
