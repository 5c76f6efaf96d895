"""Alert rules, their evaluation, and where alerts are sent."""
