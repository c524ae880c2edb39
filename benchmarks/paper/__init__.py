"""The papers' tables: run anew, beside the numbers that were printed."""
