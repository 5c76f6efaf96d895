"""Communication between the processes of one machine."""
