"""The privacy-budget ablation: its grid of runs, their execution, and a report with checks.

`coordinator ablation scale=small`
"""
