"""The privacy-budget ablation: which runs it needs, and what its rows say.

The program is `coordinator.simulation.privacy_ablation`.
"""
