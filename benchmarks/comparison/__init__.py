"""Methods compared fairly: each at its own learning rate, tuned on seeds that the table does not use.

settings/    one file per comparison: data, partition, network, methods, grid, seeds
results/     what was computed: NAME.jsonl run by run, NAME.md the table made of it
"""
