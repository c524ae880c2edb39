"""Whole federations in one process, in several, in one tensor or on Ray, and what is measured on top."""
