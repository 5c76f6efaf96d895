"""Sources of nodes, behind the `Cloud` interface, with the fakes that ship."""
