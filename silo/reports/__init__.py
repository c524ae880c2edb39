"""Reports on the hospital's page and in its commands: updates that left, requests of runs, spending and its preview.

Nothing here imports torch.
"""
