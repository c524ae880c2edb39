"""The configuration groups that Hydra composes a run from; a file says only what differs from the defaults in the code.

method/ model/ data/ federation/ privacy/  one choice each
experiment/ scale/   a paper's setting, and the same on two cores
suited/ weighed/     what suits a network, and a method's losses, on one partition of the data
ablation/            the grid of the privacy ablation
"""
