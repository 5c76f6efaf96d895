"""The recovery loop, and what it decides by."""
