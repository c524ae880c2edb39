"""A silo's local work: access to examples, optimizers, evaluation, devices."""
