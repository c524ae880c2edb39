"""Methods for class-disjoint or label-skewed data."""
