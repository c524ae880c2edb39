"""The hospital's key and certificate, and the keys of other members that it accepts."""
