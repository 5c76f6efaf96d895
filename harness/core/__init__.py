"""Code that every process shares: nouns, facts, records, batches, prices. Pure."""
