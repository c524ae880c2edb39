"""The hospital's page: `silo page`, and `silo serve --page`.

It shows the results of functions that the commands use, too.
"""
