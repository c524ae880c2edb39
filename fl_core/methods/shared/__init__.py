"""Pieces that methods share: prototypes, class vectors, generators. None of them is an algorithm."""
