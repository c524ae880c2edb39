"""Whole federations in one process, in several or on Ray, with the hospitals' code, and what is measured on top."""
