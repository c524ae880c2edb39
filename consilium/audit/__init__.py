"""Attack training's releases, to audit privacy claims. A pass proves nothing; a failure shows a fault."""
