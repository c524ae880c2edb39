"""The privacy-budget ablation: which runs it needs, how they are made, and what its rows say.

`python -m consilium.research.simulate.ablation scale=small`
"""
