"""From silo updates to one exact sum.

Floats are rounded to a fixed-point grid and added as integers: the same updates in any order give the same bytes.
Guards whose settings follow earlier rounds keep them in the server's state.
"""
