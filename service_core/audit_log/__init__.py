"""The audit log of a service: lines, the chain through them, signed heads, and the commands that read it.

`HOME/audit/log.sqlite` holds the lines and the newest head of each other side. Nothing is ever deleted here.
"""
