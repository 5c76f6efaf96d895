"""The sum of gradients over ranks: parallel strategies, exact sums, sharding."""
