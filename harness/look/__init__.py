"""Views of a run for people and trackers. Everything in this package only reads the bucket."""
