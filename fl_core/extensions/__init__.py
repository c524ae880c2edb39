"""Methods, models, data sets and partitions of other distributions: found, identified, imported where allowed."""
