"""How examples are divided among silos."""
