"""What a privacy profile means, and what a hospital has spent; `compiled_run` is the way in.

profiles/    each profile as one object that answers for a run
mechanisms/  what makes an answer private: of records, of a whole hospital, the noise itself
accounting/  planned releases, the epsilon that they cost, and what noise leaves of an accuracy
ledger/      the hospital's append-only account of releases
secagg/      sums of masked updates, of which nobody sees a single one
"""
