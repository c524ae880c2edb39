"""Shown by the hospital's page and by its commands: updates that left, requests of runs, spending and its preview.

Nothing here imports torch.
"""
