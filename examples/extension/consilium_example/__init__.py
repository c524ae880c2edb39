"""A method, a model, a data set and a partition for Consilium."""
