"""One round end to end, and what both sides agree on before the first.

The round loop is the only one: the service and the simulation differ in their ports and observers alone. The manifest
is the frozen description of a run; the layout is the public shape of every update.
"""
