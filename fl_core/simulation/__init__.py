"""Whole federations in one process or on Ray."""
