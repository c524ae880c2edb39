"""Secure aggregation, protocol consilium.secagg.v1, as pure code of both sides: no network, no disk, no torch.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with keys once per
run and shares inside the upload, as in Ma et al., "Flamingo", IEEE S&P 2023. A silo masks its update with its own seed
and one seed per pair of members, and sends every member encrypted shares of these seeds with the upload. Then one set
of uploads is fixed (sealed), t members sign it, and t members answer with the shares that remove the masks from its
sum.

terms             values that all members compute: thresholds, a run, a round, the seeds to open
messages          the messages, in plain types
keys              keys of one run, signed by identities; chains of secrets that only go forward
shamir            shares of a seed
masks             the mask of a seed
packages          encrypted shares, and commitments to seeds
silo_side         masks one vector, confirms one set, answers for it; verifies how many hospitals have a class
coordinator_side  adds uploads, seals a set, opens its sum
"""
