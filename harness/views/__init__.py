"""What people and trackers look at; everything here only reads the bucket."""
