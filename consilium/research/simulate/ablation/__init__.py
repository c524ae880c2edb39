"""The privacy-budget ablation: which runs it needs, how they are made, and what its rows say.

`coordinator ablation scale=small`
"""
