"""Methods for class-disjoint and label-skewed data."""
