"""Models of spot markets: recordings, learned rates, forecasts, and what a plan would pay."""
