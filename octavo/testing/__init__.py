"""Inputs, derived tolerances, poison, capture and replay: what octavo's tests and `octavo check` are made of."""
