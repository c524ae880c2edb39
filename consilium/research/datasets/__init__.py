"""Readers of data sets that only papers use."""
