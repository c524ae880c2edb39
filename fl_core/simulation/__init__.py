"""Whole federations in one process or on Ray, with the code that hospitals run, and what is measured on top."""
