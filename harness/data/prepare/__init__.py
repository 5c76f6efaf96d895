"""Preparing a corpus: documents, tokenizers, deduplication, shards."""
