"""A silo's local work: access to its examples, optimizers, evaluation, the papers' metrics, devices."""
