"""What everything is made of.

Nothing is re-exported here: commands that need enums or records must not load torch.
"""
