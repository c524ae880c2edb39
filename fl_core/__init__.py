"""Federated learning without network, configuration files or privacy mechanisms. Nothing here imports another package.

kinds/        the differences between trainings, evaluations and surveys
types/        values, enums, records, interfaces, arithmetic on named tensors
rounds/       one round end to end: the round loop, a silo's half, sampling, the run manifest, the layout of updates
aggregation/  from updates to one exact sum: the fixed-point format, the aggregators, adaptive guards
tensors/      torch, or a NumPy substitute for a part of it
training/     a silo's local work: access to examples, optimizers, evaluation, devices
methods/      the algorithms, one file each, by family
models/       the networks, one file per family
bodies/       checks of ONNX graphs that are run as frozen bodies, and the process that tries one
survey/       counts of records, as a run without training
datasets/     data by reference, readers of sources, partitions among silos
extensions/   methods, models, data sets and partitions of other distributions
errors/       the error classes, and the meaning of each code

`converter` reads options, configurations, manifests and policies into dataclasses; `validate` checks ranges; `rng`
names the random streams.
"""
