"""Pages on this machine's loopback: `coordinator page`, `silo page`, each served by `consilium.web`.

lead/      the lead's page
hospital/  the hospital's page
"""
