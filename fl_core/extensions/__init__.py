"""Methods, models, data sets and partitions of other distributions: find, identify and import them if allowed."""
