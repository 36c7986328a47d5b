"""Bounds over a ball around each input: linear relaxations, pulled back row by row."""
