"""The papers' tables and figures: run anew, beside the numbers that were printed."""
