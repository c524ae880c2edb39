"""From words on the command line to the frozen manifest: Hydra, then RunSpec, then the manifest."""
