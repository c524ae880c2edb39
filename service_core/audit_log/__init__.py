"""The audit log of a service: hash-chained lines, signed heads, and the commands that read it.

`HOME/audit/log.sqlite` holds the lines and the newest head of each other side. It is never rotated or shortened.
"""
