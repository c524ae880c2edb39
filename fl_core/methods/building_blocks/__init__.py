"""Prototypes, classifier geometry, generators: pieces with state, no algorithm."""
