"""Pages on this machine's loopback: `coordinator page` and `silo page`, served by `consilium.web`.

lead/      the lead's page
hospital/  the hospital's page
"""
