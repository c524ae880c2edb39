"""The configuration groups that Hydra composes a run from; a file says only what differs from the defaults in the code.

data/ federation/     one choice each; methods, models and privacy profiles are dataclasses and have no file
method/              the papers' values of methods whose defaults are others: method=fedmr_paper
experiment/ scale/   a paper's setting, and the same on two cores
suited/ weighed/     what suits a network, and a method's losses, on one partition of the data
ablation/            the grid of the privacy ablation
"""
