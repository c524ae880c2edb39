"""A task at the hospital: policy and budget first, then training.

`trainer` prepares a run once and trains its rounds; `hospital_controls` asks policy and ledger; `preflight` answers
before round 1 whether the hospital can do its whole part.
"""
