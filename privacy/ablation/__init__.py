"""The privacy-budget ablation: which runs it needs, and what its rows say.

The program, which composes whole runs, is above this layer: `python -m coordinator.simulation.privacy_ablation`.
"""
