"""Any bytes give a value or an error of ours: `python -m tests.fuzz TARGET --minutes 10 --seed N`.

`targets` lists every decoder, `calls` every call of the service, `mutations` makes the bytes, `limits` holds time and
memory, `found` keeps what once broke something.
"""
