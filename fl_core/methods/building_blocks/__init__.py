"""Pieces that methods share: prototypes, class vectors, generators, frozen copies. None of them is an algorithm."""
