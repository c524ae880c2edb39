"""The hospital's page: `silo page`, and `silo serve --page`.

What it shows comes from functions that commands use, too.
"""
