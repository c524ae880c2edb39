"""Pages on this machine's loopback: `coordinator page`, `silo page`, and what `consilium page` is served with.

lead/       the lead's page        hospital/  the hospital's page
web/        what all pages are served with
command.py  what each command `page` does
"""
