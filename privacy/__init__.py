"""What a privacy profile means, and what a hospital has spent; `compiled_run` is the way in.

profiles/    each profile as one object that answers for a run dp_sgd/      record-level privacy: clipped gradients,
noisy class sums, the private access to examples silo_dp/     silo-level privacy: one clipped and noised update per
hospital noise/       random sources, discrete Gaussian noise, rounding to integers accounting/  planned releases, and
the epsilon that they cost ledger/      the hospital's append-only account of releases reports/     what a run will
cost, what it cost, and what noise leaves of an accuracy audit/       attacks on the real code, and lower bounds on
epsilon ablation/    accuracy over epsilon: the grid of runs, checks, table and picture
"""
