"""Forecasts of what a training will cost: offers, market replay, optimum, what-if."""
