"""Loops that are differentiated in reverse at the cost of the steps they took."""
