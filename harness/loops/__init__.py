"""Training loops of others: loaders, datasets and files that a loop of its own keeps."""
