"""Object stores behind one interface: folders, fsspec, obstore."""
