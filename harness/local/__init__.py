"""The local cloud: processes of this computer as nodes, with metadata servers and a spot market."""
