"""Privacy profiles, their mechanisms, and the hospital's budget ledger; start at `compiled_run`.

profiles/    one object per profile, with its answers for a run
mechanisms/  differential privacy of records and of whole hospitals, and the noise
accounting/  planned releases, their epsilon, and confidence intervals of noisy accuracies
ledger/      the hospital's append-only account of releases
secagg/      secure aggregation: sums of masked updates
"""
