"""Methods compared fairly: each at its own learning rate, tuned on seeds that the table does not use.

settings/    one file per comparison: data, partition, network, methods, grid, seeds
protocols/   one file per comparison that judges papers' claims: the same, fixed and committed before its first run
results/     what was computed: NAME.jsonl run by run, NAME.md the table made of it
"""
