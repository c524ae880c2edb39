"""Secure aggregation, protocol consilium.secagg.v1, as pure code of both sides: no network, no disk, no torch.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with keys once per
run and shares inside the upload, as in Ma et al., "Flamingo", IEEE S&P 2023. A silo masks its update with a seed of its
own and one seed per pair of members, and hands every member encrypted shares of these seeds with the upload. Then one
set of uploads is sealed, t members sign it, and t members answer with the shares that take the masks off its sum.

terms             what members compute alike: thresholds, a run, a round, which seeds are opened
messages          what travels, in plain types
keys              keys of one run, signed by identities; chains of secrets that only go forward
shamir            shares of a seed
masks             what a seed adds to words
packages          how shares travel, and what binds a dealer to its seeds
silo_side         masks one vector, confirms one set, answers for it; verifies how many hospitals hold a class
coordinator_side  adds uploads, seals a set, opens its sum
"""
