"""Post-mortems: why a world ended, what it cost, and what would have helped."""
