"""A silo's local work: access to its examples, optimizers, evaluation, devices."""
