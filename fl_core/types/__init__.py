"""The basic types of all packages.

Nothing is re-exported here, since commands that need enums or records must not load torch.
"""
