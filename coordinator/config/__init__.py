"""From words on the command line to the frozen manifest: Hydra, RunSpec, weights from a file, the manifest."""
