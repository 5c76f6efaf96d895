"""What proves the rest: the simulation, the drill, kills, replay."""
