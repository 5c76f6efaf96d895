"""Where nodes come from, behind the `Cloud` seam; the fakes of it ship."""
