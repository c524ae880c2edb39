"""The federation without network, configuration files or privacy mechanisms. Nothing here imports another package.

kinds/        what sets trainings, evaluations and surveys apart, asked by everybody who has to tell them
types/        what all else is made of: values, enums, records, interfaces, arithmetic on named tensors
rounds/       one round end to end: the round loop, a silo's half, sampling, the run manifest, the layout of updates
aggregation/  from updates to one exact sum: the fixed-point format, the aggregator, guards whose settings follow
training/     a silo's local work: access to examples, optimizers, evaluation, devices
methods/      the algorithms, one file each, by family
models/       the networks, one file per family
survey/       counts of what records are, as a run that trains nothing
datasets/     data by reference, readers of sources, how examples are divided among silos
extensions/   methods, models, data sets and partitions of other distributions
errors/       the error classes, and what each code means

`converter` reads options, configurations, manifests and policies into dataclasses; `validate` has the checks of ranges;
`rng` names the random streams.
"""
